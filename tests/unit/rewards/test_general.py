"""Open answers: extraction, the four ways to match and the grades; real rows."""

import pytest

from rewards.general import MATCHES, GeneralReward, final_answer
from tests.unit.rewards.helpers import INFO, prompt, rows


@pytest.mark.parametrize(
    ("how", "truth", "final", "expected"),
    [
        ("exact", "Bishop", " Bishop ", 1.0),
        ("exact", "Bishop", "bishop", 0.0),
        ("normalised", "The Bishop", "a bishop!", 1.0),
        ("normalised", "8*1024", "8 * 1024", 1.0),
        ("normalised", "Caf\u00e9", "cafe", 0.0),
        ("normalised", "4.0", "4", 1.0),
        ("normalised", "1,000 men", "1000 men", 1.0),
        ("normalised", "1,234.50", "1234.5", 1.0),
        ("normalised", "4.5", "4 5", 0.0),
        ("normalised", "-4", "4", 0.0),
        ("normalised", "10", "1", 0.0),
        ("normalised", "(1,100)", "1100", 0.0),
        ("normalised", "Z\u00fcrich", "Zu\u0308rich", 1.0),
        ("normalised", "Z\u00fcrich", "Zurich", 0.0),
        ("exact", "Z\u00fcrich", "Zu\u0308rich", 1.0),
        ("normalised", "+", "+", 1.0),
        ("normalised", "+", "-", 0.0),
        ("normalised", "A", "a", 1.0),
        ("f1", "increase in pore pressure", "pore pressure", 2 * 2 / (4 + 2)),
        ("f1", "x y", "y x", 1.0),
        ("f1", "x", "y", 0.0),
        ("f1", "x x", "x", 2 / 3),
        ("rouge_l", "x y", "y x", 0.5),
        ("rouge_l", "police killed the gunman", "police kill the gunman", 2 * 2 / (3 + 3)),
        ("rouge_l", "a b c d", "x", 0.0),
    ],
)
def test_matches(how, truth, final, expected):
    assert MATCHES[how](truth, final) == pytest.approx(expected)
    assert MATCHES[how](final, truth) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("\\boxed{1} and \\boxed{a {b} c}", ("a {b} c", True)),
        ("<answer>\n x \n</answer>", ("x", True)),
        ("Therefore, the answer is: **Ileum**\nBye", ("Ileum**", True)),
        ("The answer is \\boxed{Ileum}.", ("\\boxed{Ileum}.", True)),
        ("one\ntwo", ("two", False)),
        ("<think>the answer is x", ("", False)),
        ("<think>the answer is x</think>y", ("y", False)),
    ],
)
def test_final_answer(answer, expected):
    assert final_answer(answer) == expected


RIGHT_MARKED, RIGHT, MARKED, NEITHER = "The answer is x", "x", "The answer is y", "y"


@pytest.mark.parametrize(
    ("grade", "expected"),
    [
        ("match", (1.0, 1.0, 0.0, 0.0)),
        ("loose", (1.0, 1.0, -1.0, -1.0)),
        ("soft", (1.0, 0.5, -0.5, -1.0)),
        ("strict", (1.0, -1.0, -1.0, -1.0)),
    ],
)
def test_grades(grade, expected):
    rewarder = GeneralReward(grade=grade)
    answers = (RIGHT_MARKED, RIGHT, MARKED, NEITHER)
    assert tuple(rewarder.score(prompt("x"), answer, INFO).score for answer in answers) == expected


def test_threshold_says_what_is_right():
    half = GeneralReward("f1", "loose", threshold=0.5)
    assert half.score(prompt("x y"), "x", INFO).score == 1.0
    assert half.score(prompt("x y z v"), "x", INFO).score == -1.0


def test_no_final_answer_is_wrong_format():
    assert GeneralReward().score(prompt("x"), "<think>x", INFO).status == "wrong_format"


@pytest.mark.parametrize("args", [{"match": "bleu"}, {"grade": "hard"}])
def test_unknown_names_name_the_known(args):
    with pytest.raises(ValueError, match="known are"):
        GeneralReward(**args)


def test_gold_answers_of_multi_subject_score_one_and_those_of_other_rows_zero():
    rewarder, truths = GeneralReward(), [row["ground_truth"] for row in rows("multi_subject/train.jsonl")]
    alike = 0
    for truth, other in zip(truths, truths[1:], strict=False):
        assert rewarder.score(prompt(truth), f"I think.\nTherefore, the answer is {truth}", INFO).score == 1.0, truth
        alike += truth != other and rewarder.score(prompt(truth), f"The answer is {other}", INFO).score > 0
    assert alike == 0
