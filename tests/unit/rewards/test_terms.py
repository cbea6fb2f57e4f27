"""Form, length and repetition, and their weighted sum."""

import asyncio
import inspect

import pytest

from rewards.composite import CompositeReward
from rewards.format import FORMS, FormatReward
from rewards.length import LengthReward
from rewards.repetition import RepetitionReward
from spmd_rl.base.errors import UserError
from spmd_rl.base.targets import build_target
from spmd_rl.sidecar.wire import ScoreInput
from spmd_rl.sidecar.worker import call_mode, judge_batch
from spmd_rl.types import AnswerInfo, Verdict
from tests.unit.rewards.helpers import INFO, prompt, score, verdict

HERE = __name__
FORM = {"target": "rewards.format:FormatReward", "args": {"form": "boxed"}, "weight": 0.5}


class Failing:
    """A part that has no score to give."""

    def __init__(self, status: str = "timeout") -> None:
        self._status = status

    def score(self, prompt, answer, info):
        return Verdict(self._status, detail="too slow")


class Waiting:
    """A part that waits, and asks for a service."""

    def __init__(self, http) -> None:
        self._http = http

    async def score(self, prompt, answer, info):
        await asyncio.sleep(0)
        return Verdict("wrong_format", 0.25, {"http": self._http})


@pytest.mark.parametrize(
    ("form", "answer", "expected"),
    [
        ("boxed", "so \\boxed{4}.", 1.0),
        ("boxed", "so \\boxed{}", 0.0),
        ("think", "<think>x</think> y", 1.0),
        ("think", "<think>x</think>", 0.0),
        ("think", "y <think>x</think> y", 0.0),
        ("think_boxed", "<think>x</think> so\n\\boxed{4}", 1.0),
        ("think_boxed", "<think>\\boxed{4}</think>", 0.0),
        ("think_answer", "<think>x\n</think>\n<answer>4</answer>", 1.0),
        ("think_answer", "<think>x</think><answer>4</answer> bye", 0.0),
        ("think_answer", "<think>x</think><answer>4</answer><answer>5</answer>", 0.0),
        ("answer", "x <answer>4</answer>", 1.0),
        ("answer", "4", 0.0),
    ],
)
def test_forms(form, answer, expected):
    assert FormatReward(form).score(prompt(""), answer, INFO).score == expected


def test_a_pattern_of_ones_own_and_an_unknown_form():
    assert FormatReward(pattern="a.*z").score(prompt(""), "a\nz", INFO).score == 1.0
    with pytest.raises(ValueError, match=", ".join(FORMS)):
        FormatReward("json")


def test_long_answers_do_not_hang_the_forms():
    for form in FORMS:
        assert FormatReward(form).score(prompt(""), "<think>" * 3000 + "x" * 30_000, INFO).score == 0.0


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (999, -1.0)]
)
def test_length_falls_over_the_buffer(tokens, expected):
    rewarder = LengthReward(max_tokens=100, buffer=20)
    assert rewarder.score(prompt(""), "", AnswerInfo(tokens, "stop")).score == pytest.approx(expected)


@pytest.mark.parametrize("args", [{"max_tokens": 5, "buffer": 6}, {"buffer": 0}])
def test_length_refuses_a_buffer_that_is_none(args):
    with pytest.raises(ValueError, match="buffer"):
        LengthReward(**args)


@pytest.mark.parametrize(
    ("n", "answer", "expected"),
    [
        (1, "a b a b", -0.5),
        (2, "a b a b", -1 / 3),
        (3, "a b", 0.0),
        (2, "\u4f60\u597d\u4f60\u597d", -1 / 3),
        (1, "A a", -0.5),
    ],
)
def test_repetition_is_the_share_said_before(n, answer, expected):
    assert RepetitionReward(n).score(prompt(""), answer, INFO).score == pytest.approx(expected)


def composite(**parts) -> CompositeReward:
    return build_target("reward.x", "rewards.composite:CompositeReward", {"parts": parts}, services={"http": lambda: 7})


def test_composite_weighs_and_names_its_parts():
    both = composite(math={"target": "rewards.math_verify:MathReward"}, form=FORM)
    assert verdict(both, prompt("4"), "\\boxed{4}") == Verdict(
        "ok", 1.5, {"math": 1.0, "math.correct": 1.0, "math.boxed": 1.0, "form": 1.0, "form.well_formed": 1.0}
    )
    assert call_mode(both) == "sync" and not inspect.isawaitable(both.score(prompt("4"), "4", INFO))
    assert both.score(prompt("4"), "no idea", INFO).status == "wrong_format"


def test_composite_waits_for_parts_that_wait_and_hands_them_their_service():
    both = composite(form=FORM, judge={"target": f"{HERE}:Waiting", "weight": 2})
    assert call_mode(both) == "async"
    found = asyncio.run(score(both, prompt("4"), "\\boxed{4}"))
    assert found == Verdict("wrong_format", 1.0, {"form": 1.0, "form.well_formed": 1.0, "judge": 0.25, "judge.http": 7})


@pytest.mark.parametrize("status", ["timeout", "error", "rejected"])
def test_a_failed_part_is_the_failure_of_the_whole(status):
    part = {"target": f"{HERE}:Failing", "args": {"status": status}, "weight": 0}
    found = verdict(composite(form=FORM, slow=part), prompt("4"), "\\boxed{4}")
    assert found == Verdict(status, 0.0, {}, "slow: too slow") and not found.scored


def accuracy(completions, **columns):
    """As TRL calls it."""
    texts = [completion[0]["content"] for completion in completions]
    if "broken" in texts:
        raise ValueError("broken")
    return [float("boxed{" + gold + "}" in text) for text, gold in zip(texts, columns["ground_truth"], strict=True)]


def few(completions):
    return [1.0]


BATCH = {"target": f"{HERE}:accuracy", "weight": 2}


def test_composite_hands_functions_of_many_answers_all_of_them():
    both = composite(accuracy=BATCH, form=FORM)
    assert call_mode(both) == "batch"
    found = both.score_batch([prompt("4"), prompt("5")], ["\\boxed{4}", "\\boxed{4}"], [INFO, INFO])
    assert [v.score for v in found] == [2.5, 0.5] and found[0].parts["accuracy"] == 1.0
    assert verdict(both, prompt("4"), "\\boxed{4}") == found[0]  # as an audit asks


def test_composite_of_many_answers_asks_no_part_after_one_that_failed():
    late = composite(slow={"target": f"{HERE}:Failing"}, accuracy=BATCH)
    assert [v.status for v in late.score_batch([prompt("4")] * 2, ["broken"] * 2, [INFO] * 2)] == ["timeout"] * 2


def test_one_answer_does_not_spoil_the_batch_of_a_composite():
    both = composite(accuracy=BATCH, form=FORM)
    given = [ScoreInput(prompt("4"), answer, INFO) for answer in ("\\boxed{4}", "broken")]
    assert [v.status for v in judge_batch(both, given)] == ["ok", "error"]


def test_composite_waits_where_one_part_is_async_and_another_takes_many():
    both = composite(accuracy=BATCH, judge={"target": f"{HERE}:Waiting"})
    assert call_mode(both) == "async"
    assert asyncio.run(score(both, prompt("4"), "\\boxed{4}")).parts["accuracy"] == 1.0


def test_a_part_with_too_few_scores_is_named():
    with pytest.raises(ValueError, match="few: 1 scores for 2 answers"):
        composite(few={"target": f"{HERE}:few"}).score_batch([prompt("4")] * 2, ["4"] * 2, [INFO] * 2)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "at least one"),
        ({"a": {"target": "rewards.format"}}, "parts.a.target: must be module:Class"),
        ({"a": {"target": "rewards.format:Nothing"}}, "no class Nothing"),
        ({"a": FORM | {"wieght": 1}}, "parts.a.wieght: known are"),
        ({"a": FORM | {"args": {"form": "x"}}}, "known are boxed"),
    ],
)
def test_composite_tells_mistakes_at_the_start(parts, message):
    with pytest.raises(UserError, match=message):
        composite(**parts)
