"""Mathematics: real gold answers, answers of other rows, our reader against the library, votes, and hostile answers."""

import random
import time

import pytest

import rewards.math_verify
from rewards.math_verify import MathReward, final_answer
from rewards.mathematics.reading import readings
from spmd_rl.types import Verdict
from tests.patience import patient
from tests.unit.rewards.helpers import INFO, gsm8k_truth, prompt, rows

ALIKE = {frozenset(pair) for pair in [("Yes", "yes"), ("No", "no"), ("True", "true"), ("y = 1", "1")]}
"""Pairs of ground truths that are not the same text and mean the same."""
LENIENT = {("0", "a + b - c = 0"), ("0", "\\{0\\}"), ("\\{0\\}", "0")}
"""False positives: the right side of an equation counts, and a set of one for its element."""
ENDLESS = "(1 + i)\\left(1 - 2^{-2^{2001}}\\right)"
"""Comparing it with anything but itself takes longer than the limit."""


@pytest.fixture(scope="module")
def rewarder() -> MathReward:
    return MathReward(seconds=2.0)


def points(rewarder: MathReward, truth: str, answer: str) -> float | str:
    verdict = rewarder.score(prompt(truth), answer, INFO)
    return verdict.score if verdict.scored else verdict.status


ASKED = "What is $29 + 9$? Reply with the number only."


@pytest.mark.parametrize(
    ("question", "truth", "answer", "score"),
    [
        (ASKED, "38", "The exact result of 29 + 9 will be", 0.0),
        (ASKED, "38", "29 + 9 = 29 + 9", 0.0),
        (ASKED, "38", "\\boxed{29 + 9}", 0.0),
        (ASKED, "38", "29 + 9 = 38", 1.0),
        (ASKED, "38", "\\boxed{38.0}", 1.0),
        ("Write \\(2^{10}\\) out.", "1024", "It is $2^{10}$", 0.0),
        ("How many bytes are a kilobyte?", "1024", "$2^{10}$", 1.0),
        ("Which is more, 3/4 or 2/3?", "3/4", "3/4", 1.0),
        ("How much more than 1000 is 1,000?", "1,000", "1000", 1.0),
    ],
)
def test_a_calculation_of_the_question_is_no_answer(rewarder, question, truth, answer, score):
    verdict = rewarder.score(prompt(truth, question), answer, INFO)
    assert (verdict.status, verdict.score) == ("ok", score)
    right = rewarder.score(prompt(truth, question), truth, INFO)
    assert right.score == 1.0 and (verdict.answer == right.answer) == bool(score)


def test_all_gold_answers_of_gsm8k_score_one_and_those_of_other_rows_zero(rewarder):
    data = rows("gsm8k/test.jsonl")
    for row, other in zip(data, [*data[1:], data[0]], strict=True):
        truth = gsm8k_truth(row)
        for answer in (row["answer"], f"So it is \\boxed{{{truth}}}.", f"The answer is ${truth}.", truth):
            assert rewarder.score(prompt(truth, row["question"]), answer, INFO).score == 1.0, (truth, answer)
        if gsm8k_truth(other) != truth:
            assert points(rewarder, truth, other["answer"]) == 0.0, (truth, other["answer"])


def test_all_gold_answers_of_deepmath_score_one(rewarder):
    for truth in dict.fromkeys(row["ground_truth"] for row in rows("deepmath/train.jsonl")):
        for form in ("So it is $\\boxed{%s}$.", "The answer is $%s$.", "The answer is: \\(%s\\)", "%s"):
            assert points(rewarder, truth, form.replace("%s", truth)) == 1.0, (truth, form)


def test_deepmath_answers_of_other_rows_score_zero(rewarder):
    truths = [row["ground_truth"] for row in rows("deepmath/train.jsonl")][:1200]
    for truth, other in zip(truths, truths[1:], strict=False):
        if truth != other and frozenset((truth, other)) not in ALIKE:
            expected = float((truth, other) in LENIENT)
            assert points(rewarder, truth, f"\\boxed{{{other}}}") == expected, (truth, other)


SPELLINGS = r"""
    1/2 0.5 .5 \frac{1}{2} \dfrac12 -\frac{1}{2} -\frac{-1}{2} 10/2 1/3 0.333333 0.3333 0.333 5 5.0 -5 +5 $5$ x=5 y=5
    1,000 1000 1{,}000 1000.0 1~2 1,2
"""


def test_what_is_read_agrees_with_the_library(monkeypatch):
    spelled = [text.replace("~", " ") for text in SPELLINGS.split()]
    pairs = [(a, b) for a in spelled for b in spelled]
    if truths := [row["ground_truth"] for row in rows("deepmath/train.jsonl") if row["ground_truth"] != ENDLESS]:
        random.Random(0).shuffle(truths)
        pairs += list(zip(truths[:200], truths[1:200]))
    rewarder = MathReward()
    decided = {pair: points(rewarder, pair[0], f"\\boxed{{{pair[1]}}}") for pair in pairs if all(map(readings, pair))}
    assert len(decided) > 0.8 * len(pairs)
    monkeypatch.setattr(rewards.math_verify, "readings", lambda text: ())
    for (truth, answer), ours in decided.items():
        if truth.lower() not in ("yes", "no", "true", "false"):
            assert points(rewarder, truth, f"\\boxed{{{answer}}}") == ours, (truth, answer, ours)


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        ("12\\pi", "\\boxed{12\\pi \\text{ cm}^2}", 1.0),
        ("12\\pi \\text{ m}", "\\boxed{12\\pi \\text{ cm}}", 0.0),
        ("10 \\text{ cm}", "\\boxed{10 centimeters}", 1.0),
        ("45^\\circ", "\\boxed{45}", 1.0),
        ("45^\\circ", "\\boxed{45 degrees}", 1.0),
        ("45^\\circ", "\\boxed{44}", 0.0),
        ("25", "\\boxed{25\\%}", 1.0),
        ("1/4", "\\boxed{25\\%}", 1.0),
        ("25\\%", "\\boxed{0.25}", 1.0),
        ("25\\%", "\\boxed{2500}", 0.0),
        ("(1, \\infty)", "\\boxed{x > 1}", 1.0),
        ("[0, 1)", "\\boxed{0 \\le x < 1}", 1.0),
        ("[0, 1)", "\\boxed{(0, 1)}", 0.0),
        ("x = 1 \\text{ or } x = 2", "\\boxed{1, 2}", 1.0),
        ("x = 3", "\\boxed{3}", 1.0),
        ("x = 3", "\\boxed{y = 3}", 0.0),
        ("2\\sqrt{3}", "\\boxed{\\sqrt{12}}", 1.0),
        ("m^n - m", "\\boxed{-m + m^n}", 1.0),  # the last m is no metre
        ("\\sec^2 t", "\\boxed{\\frac{1}{\\cos^2 t}}", 1.0),
        ("4 + 3i", "\\boxed{3 i + 4}", 1.0),
        ("2x + 1", "$$ y = 2x + 1 $$", 1.0),
        ("2x + 1", "It follows that\n\\[\n1 + 2x\n\\]", 1.0),
        ("5", "So he has 5 apples and is happy.", 1.0),
        ("5", "The final answer is $5$. I hope it is correct.", 1.0),
        ("5", "The answer is: **5**", 1.0),
        ("Yes", "**Yes**, it converges.", 1.0),
        ("Yes", "It does not. No.", 0.0),
        ("True", "\\boxed{\\text{False}}", 0.0),
        ("1.5 \\times 10^3", "\\boxed{1500}", 1.0),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix}1\\\\3\\end{pmatrix}}", 0.0),
        ("60", "\\boxed{5 dozen}", 0.0),
        ("5", "\\boxed{5 or 6}", 0.0),
        ("5", "\\boxed{5x}", 0.0),
        ("10", "\\boxed{1 0}", 0.0),
        ("8", "\\boxed{\\mathbb{Z}_8}", 0.0),
        ("5", "\\boxed{3, 5 \\foo}", 0.0),  # what cannot be read as a whole is not searched for a number
        ("3", "2x^2 + 3y^2 = d", 0.0),
        ("7", "\\boxed{" * 3000, 0.0),
        ("7", "7" * 5000, 0.0),
        ("7", "x" * 100_000, 0.0),
        ("7", "\\boxed{" + "((" * 2000 + "}", 0.0),
    ],
)
def test_hand_made_pairs(rewarder, truth, answer, expected):
    assert points(rewarder, truth, answer) == expected


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("\\boxed{a{b}c}", ("a{b}c", True)),
        ("\\boxed{1} \\boxed{2}", ("2", True)),
        ("\\boxed{1", ("", True)),
        ("<think>\\boxed{1}</think> \\boxed{2}\nbye", ("2", True)),
        ("<think> 5", ("", False)),
        ("one\ntwo\n\n", ("two", False)),
        ("The final answer is $5$. I hope it is correct.", ("$5$", False)),
        ("so\n\\[\nx\n\\]", ("x", False)),
        ("", ("", False)),
    ],
)
def test_final_answer(text, final):
    assert final_answer(text) == final


def test_no_mathematics_is_wrong_format(rewarder):
    parts = {"correct": 0.0, "boxed": 0.0}
    assert rewarder.score(prompt("3"), "I do not know", INFO) == Verdict("wrong_format", 0.0, parts)
    assert rewarder.score(prompt("3"), "", INFO).status == "wrong_format"


def test_comparison_without_end_is_a_timeout_not_a_zero():
    start = time.perf_counter()
    truth, answer = (f"\\sum_{{k=1}}^{{10^9}} \\{name} k" for name in ("sin", "cos"))
    verdict = MathReward(seconds=0.3).score(prompt(truth), f"\\boxed{{{answer}}}", INFO)
    assert verdict.status == "timeout" and time.perf_counter() - start < patient(3)
    time.sleep(0.3)  # no alarm is left behind


def test_a_ground_truth_without_a_letter_or_digit_is_refused(rewarder):
    with pytest.raises(ValueError, match="not mathematics"):
        rewarder.score(prompt("???"), "3", INFO)


def test_what_the_library_cannot_read_is_compared_as_text(rewarder):
    assert points(rewarder, "\\mathbb{Z}_8", "\\boxed{ \\mathbb{Z}_{8} }") == 1.0
    assert points(rewarder, "\\mathbb{Z}_8", "\\boxed{\\mathbb{Z}_4}") == 0.0
