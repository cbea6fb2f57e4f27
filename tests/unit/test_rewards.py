"""Every rewarder of ours: its own examples, a look at it as a user's template, and real gold answers."""

import ast
import asyncio
import importlib
import inspect
import json
import os
import time
from pathlib import Path

import pytest

from rewards.math_verify import MathReward, final_answer
from rewards.reasoning_gym import EXTRACT, ReasoningGymReward
from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SPMD_RL_DATA", ROOT.parent / "shared" / "data"))
FILES = sorted(path for path in (ROOT / "rewards").glob("*.py") if path.stem != "__init__")
INFO = AnswerInfo(1, "stop")


def rewarders(path: Path) -> list[type]:
    module = importlib.import_module(f"rewards.{path.stem}")
    classes = inspect.getmembers(module, inspect.isclass)
    return [cls for _, cls in classes if cls.__module__ == module.__name__ and hasattr(cls, "examples")]


async def call(rewarder, prompt: Prompt, answer: str) -> Verdict:
    verdict = rewarder.score(prompt, answer, INFO)
    return await verdict if inspect.isawaitable(verdict) else verdict


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples(path):
    (cls,) = rewarders(path)
    scores = set()
    for prompt, answer, score in cls.examples():
        verdict = asyncio.run(call(cls(), prompt, answer))
        assert verdict.scored and verdict.score == score, (prompt.ground_truth, answer, verdict)
        scores.add(score)
    assert len(scores) > 1, "examples must hold right and wrong answers"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_rewarder_is_a_file_one_can_copy(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 120
    for node in ast.walk(ast.parse(source)):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            assert module.split(".")[0] not in {"spmd_rl", "envs", "rewards"} or module == "spmd_rl.types", module


def math_prompt(truth: str) -> Prompt:
    return Prompt("0" * 32, (Message("user", "?"),), "math", truth)


@pytest.fixture(scope="module")
def gsm8k() -> list[tuple[str, str]]:
    """(gold answer, its reasoning) of some test rows."""
    path = DATA / "gsm8k" / "test.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}")
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()[:500]]
    return [(answer.rpartition("####")[2].strip(), answer) for answer in answers]


def test_gsm8k_gold_answers_score_one(gsm8k):
    rewarder, start = MathReward(), time.perf_counter()
    for gold, reasoning in gsm8k:
        assert rewarder.score(math_prompt(gold), reasoning, INFO).score == 1.0, reasoning
        assert rewarder.score(math_prompt(gold), f"So it is \\boxed{{{gold}}}.", INFO).score == 1.0, gold
        assert rewarder.score(math_prompt(gold), gold, INFO).score == 1.0, gold
    print(f"\n{3 * len(gsm8k) / (time.perf_counter() - start):.0f} verdicts/s")


def test_gsm8k_answers_of_other_rows_score_zero(gsm8k):
    rewarder = MathReward()
    for (gold, _), (other, reasoning) in zip(gsm8k, gsm8k[1:], strict=False):
        if gold != other:
            assert rewarder.score(math_prompt(gold), reasoning, INFO).score == 0.0, (gold, reasoning)


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("\\boxed{a{b}c}", ("a{b}c", True)),
        ("\\boxed{1} \\boxed{2}", ("2", True)),
        ("\\boxed{1", ("", True)),
        ("<think>\\boxed{1}</think> \\boxed{2}\nbye", ("2", True)),
        ("<think> 5", ("", False)),
        ("one\ntwo\n\n", ("two", False)),
        ("", ("", False)),
    ],
)
def test_final_answer(text, final):
    assert final_answer(text) == final


def test_math_without_mathematics_is_wrong_format():
    assert MathReward().score(math_prompt("3"), "I do not know", INFO) == Verdict(
        "wrong_format", 0.0, {"correct": 0.0, "boxed": 0.0}
    )


def test_math_comparison_without_end_is_a_timeout_not_a_zero():
    start = time.perf_counter()
    verdict = MathReward(seconds=0.3).score(math_prompt("\\pi^3"), "\\boxed{10^{10^{10}}}", INFO)
    assert verdict.status == "timeout" and time.perf_counter() - start < 3
    time.sleep(0.3)  # no alarm is left behind


def test_math_refuses_a_ground_truth_it_cannot_read():
    with pytest.raises(ValueError, match="not mathematics"):
        MathReward().score(math_prompt("???"), "3", INFO)


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
