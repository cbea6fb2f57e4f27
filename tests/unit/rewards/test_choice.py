"""Multiple choice: where the letter may stand, and what is no letter."""

import pytest

from rewards.choice import ChoiceReward, letters
from tests.unit.rewards.helpers import prompt, verdict


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("\\boxed{B}", "B"),
        ("\\boxed{b}", "B"),
        ("\\boxed{\\textbf{(A)}}", "A"),
        ("\\boxed{B) Paris}", "B"),
        ("\\boxed{AC}", "AC"),
        ("\\boxed{A, C}", "AC"),
        ("\\boxed{A} or rather \\boxed{D}", "D"),
        ("\\boxed{I think}", ""),
        ("The correct answer is option B.", "B"),
        ("The answer is **B**.", "B"),
        ("The answer is: \\(B\\)", "B"),
        ("answer: B) Paris", "B"),
        ("**Answer:** D", "D"),
        ("Option A is wrong. The answer is B", "B"),
        ("Answer: A because of x", "A"),
        ("The answer is A or B", "AB"),
        ("Answer: A city", ""),
        ("The answer is I think Rome", ""),
        ("B. Paris", "B"),
        ("(I)", "I"),
        ("$B$", "B"),
        ("I think so", ""),
        ("A city in France", ""),
        ("so B", ""),
        ("<think>The answer is B", ""),
        ("<think>The answer is B</think>The answer is C", "C"),
        ("", ""),
        ("The answer is C. Option D is tempting, but wrong.", "C"),
        ("The correct answer is C.\n\nChoice A is incorrect because it ignores friction.", "C"),
        ("Option A is correct. Option B is wrong.", "A"),
        ("Option A isn't right, option B is not correct and C is clearly wrong. So only D is left.", "D"),
        ("Is the answer A? No, choice B looks wrong too; I choose C.", "C"),
        ("The answer is B.\nWait, option C is the correct one", "C"),
        ("We can rule out options A and B: option D.", "D"),
        ("So \\boxed{\\langle H\\rangle \\ll \\Delta E}.\n\n**Answer: D**", "D"),
        ("We get $\\boxed{12}$, which is option C.", "C"),
        ("\\boxed{B} as $x = \\boxed{12}$", "B"),
        ("<answer>B</answer>", "B"),
        ("<answer>(b)</answer>", ""),
        ('{"answer": "B"}', "B"),
        ('{"letter": "A", "answer": "C"}', "C"),
        ("**Answer**: (A)", "A"),
        ("Option D is wrong.", ""),
        ("Is it option B?", ""),
        ("\\boxed{12}", ""),
    ],
)
def test_letters(answer, expected):
    assert letters(answer) == set(expected)


def test_the_text_of_a_choice_is_as_good_as_its_letter():
    choices = ["Rome", "A city"]
    assert letters("It is\n**a city.**", choices) == {"B"}
    assert letters("\\boxed{\\text{Rome}}", choices) == {"A"}


def test_hedging_is_wrong_and_silence_is_wrong_format():
    assert verdict(ChoiceReward(), prompt("A"), "The answer is A or B").score == 0.0
    assert verdict(ChoiceReward(), prompt("A"), "Who knows?").status == "wrong_format"


@pytest.mark.parametrize("truth", ["", "Paris", "K", "7"])
def test_a_truth_that_is_no_letter_is_an_error_not_a_zero(truth):
    assert verdict(ChoiceReward(), prompt(truth), "A").status == "error"
