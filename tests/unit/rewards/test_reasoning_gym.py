"""reasoning-gym's own scorers behind our extraction."""

import json

import pytest

from rewards.reasoning_gym import EXTRACT, ReasoningGymReward
from spmd_rl.types import Prompt
from tests.unit.rewards.helpers import INFO


@pytest.mark.parametrize(
    ("how", "answer", "extracted"),
    [
        ("whole", " 12 \n", "12"),
        ("last_number", "3 + 4 = 7.", "7"),
        ("last_number", "the sum is -4", "-4"),
        ("last_number", "9-4", "4"),
        ("last_number", "1,234.50 dollars", "1234.50"),
        ("last_number", "\N{MINUS SIGN}12", "-12"),
        ("last_number", "none", ""),
        ("answer_tag", "<answer> a </answer><answer>b</answer>", "b"),
        ("answer_tag", "b", ""),
    ],
)
def test_extraction(how, answer, extracted):
    assert EXTRACT[how](answer) == extracted


def sums_prompt() -> Prompt:
    return next(ReasoningGymReward.examples())[0]


def test_reasoning_gym_strict_leaves_the_full_score_only():
    answer = "the sum is -4"
    assert ReasoningGymReward().score(sums_prompt(), answer, INFO).score == 0.0
    partial = ReasoningGymReward(strict=False).score(sums_prompt(), answer, INFO)
    assert partial.status == "ok" and 0.0 < partial.score < 1.0
    assert ReasoningGymReward(extract="last_number").score(sums_prompt(), answer, INFO).score == 1.0


def test_reasoning_gym_nothing_to_score_is_wrong_format():
    assert ReasoningGymReward(extract="last_number").score(sums_prompt(), "no idea", INFO).status == "wrong_format"


def test_reasoning_gym_names_the_known_ways_to_extract():
    with pytest.raises(ValueError, match="whole, last_number, answer_tag"):
        ReasoningGymReward(extract="first")


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "letter_counting", "countdown", "number_sorting"])
def test_reasoning_gym_verifies_what_it_generates_after_a_journey_through_json(task):
    import reasoning_gym

    rewarder = ReasoningGymReward()
    for entry in reasoning_gym.create_dataset(task, seed=1, size=5):
        entry = json.loads(json.dumps(entry))
        prompt = Prompt("0" * 32, (), "rg", entry["answer"], {"task": task, "entry": entry})
        answer = entry["answer"] if entry["answer"] is not None else entry["metadata"]["expression"]
        assert rewarder.score(prompt, answer, INFO).score == 1.0, entry
        assert rewarder.score(prompt, "zzz", INFO).score == 0.0, entry
