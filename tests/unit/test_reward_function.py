"""A plain function as a reward: which parameters it may have, what it may return, and where it raised."""

import asyncio
import shlex
import sys
from pathlib import Path

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.base.targets import build_target
from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.worker import call_mode, judge
from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

MINE = """
from spmd_rl.types import Verdict
def ours(prompt, answer, info): return Verdict("ok", info.num_tokens + len(answer) + len(prompt.messages))
def any_names(p, a, i): return a == p.ground_truth
def short(answer, ground_truth): return int(answer == ground_truth)
def other_order(solution, completion): return completion == solution
def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, scale=1.0):
    right = solution_str == ground_truth and data_source == "gsm8k" and extra_info == {"index": 3}
    return {"score": scale * right, "acc": right, "pred": solution_str}
async def later(response, domain): return domain == "toy"
def trl(prompts, completions, ground_truth, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    assert [prompt[-1]["role"] for prompt in prompts] == ["user"] * len(contents)
    return [float(content == gold) for content, gold in zip(contents, ground_truth, strict=True)]
def with_column(completions, difficulty): return difficulty
def with_columns(completions, **columns):
    rows = {"data_source", "difficulty", "extra_info"}
    assert columns.keys() == {"prompts", "answer", "ground_truth", "solution"} | rows
    return columns["difficulty"]
class Judge:
    def __call__(self, answer): return 0.25
instance = Judge()
def nothing(answer): return None
def nan(answer): return float("nan")
def text(answer): return "1.0"
def listed(answer): return [1.0]
def raising(answer):
    number = int(answer)
    return 1 / (number - 4)
def typo(anwser, ground_truth): return 1.0
def no_parameter(): return 1.0
async def later_batch(completions): return [1.0]
number = 3
"""
PROMPT = Prompt(
    "0" * 32,
    (Message("user", "2 + 2?"),),
    "toy",
    "4",
    {"data_source": "gsm8k", "extra_info": {"index": 3}, "difficulty": 0.5},
)


@pytest.fixture
def build(tmp_path, monkeypatch):
    (tmp_path / "my_function_reward.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_function_reward", raising=False)
    return lambda name, **args: build_target("reward.toy", f"my_function_reward:{name}", args)


def verdict_of(rewarder, answer: str = "4") -> Verdict:
    return asyncio.run(judge(rewarder, wire.ScoreInput(PROMPT, answer, AnswerInfo(7, "stop"))))


@pytest.mark.parametrize(
    ("name", "args", "mode", "score", "parts"),
    [
        ("ours", {}, "sync", 9.0, {}),
        ("any_names", {}, "sync", 1.0, {}),
        ("short", {}, "sync", 1.0, {}),
        ("short", {"ground_truth": "5"}, "sync", 0.0, {}),
        ("other_order", {}, "sync", 1.0, {}),
        ("compute_score", {}, "sync", 1.0, {"acc": 1.0}),
        ("compute_score", {"scale": 3.0}, "sync", 3.0, {"acc": 1.0}),
        ("later", {}, "async", 1.0, {}),
        ("trl", {}, "batch", 1.0, {}),
        ("with_column", {}, "batch", 0.5, {}),
        ("with_columns", {}, "batch", 0.5, {}),
        ("instance", {}, "sync", 0.25, {}),
    ],
)
def test_what_a_function_may_look_like(build, name, args, mode, score, parts) -> None:
    rewarder = build(name, **args)
    assert call_mode(rewarder) == mode
    assert verdict_of(rewarder) == Verdict("ok", score, parts)


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("nothing", "TypeError: score returned NoneType, not a number, a dict with `score` or a Verdict"),
        ("nan", "ValueError: score is nan"),
        ("text", "TypeError: score returned str"),
        ("listed", "TypeError: score returned list"),
        ("raising", "my_function_reward.py:29: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_number_is_an_error_and_never_a_zero(build, name, detail) -> None:
    verdict = verdict_of(build(name))
    assert (verdict.status, verdict.scored) == ("error", False)
    assert verdict.detail.startswith(detail)


def test_the_traceback_begins_with_the_users_code(build) -> None:
    lines = verdict_of(build("raising")).traceback.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "ZeroDivisionError: division by zero"
    assert lines[1].endswith('my_function_reward.py", line 29, in raising')


@pytest.mark.parametrize(
    ("name", "args", "line"),
    [
        ("typo", {}, "parameter `anwser` is unknown: known are prompt, "),
        ("no_parameter", {}, "it has no parameter for the answer"),
        ("short", {"strict": True}, "unexpected keyword argument 'strict'"),
        ("later_batch", {}, "must be a plain `def`"),
        ("number", {}, "has no class number and no such function"),
    ],
)
def test_a_function_that_cannot_be_called_is_told_at_the_start(build, name, args, line) -> None:
    with pytest.raises(UserError) as raised:
        build(name, **args)
    assert str(raised.value).startswith(f"reward.toy.target: my_function_reward:{name} ") and line in str(raised.value)


def test_a_file_in_place_of_a_module_gets_the_cure() -> None:
    with pytest.raises(UserError, match="write my_reward:score with its folder on PYTHONPATH"):
        build_target("reward.toy", "./rewards/my_reward.py:score", {})


def test_a_function_is_a_part_of_a_composite(build) -> None:
    parts = {"right": {"target": "my_function_reward:short"}, "other": {"target": "my_function_reward:compute_score"}}
    both = build_target("reward.toy", "rewards.composite:CompositeReward", {"parts": parts})
    assert verdict_of(both) == Verdict("ok", 2.0, {"right": 1.0, "other": 1.0, "other.acc": 1.0})


def test_the_two_functions_of_the_docs_for_users_of_trl(tmp_path, monkeypatch) -> None:
    page = (Path(__file__).parents[2] / "docs/MIGRATING.md").read_text().split("## Several reward functions")[1]
    source, recipe = (page.split(f"```{name}\n")[1].split("```")[0] for name in ("python", "yaml"))
    (tmp_path / "trl_rewards.py").write_text(source)
    (tmp_path / "two.yaml").write_text(recipe)
    monkeypatch.syspath_prepend(tmp_path)
    line = page.split("```bash\n")[1].split("```")[0].replace("\\\n", " ")
    for given, folder, name in (
        (shlex.split(line)[3:], None, "rlvr"),
        (["data.train=rows.jsonl"], str(tmp_path), "two"),
    ):
        reward = load("rlvr", RlvrConfig, given, folder, name).reward.domains["math"]
        both = build_target("reward.math", reward.target, reward.args)
        found = both.score_batch([PROMPT] * 3, ["\\boxed{4}", "\\boxed{5}", "4"], [AnswerInfo(1, "stop")] * 3)
        assert [verdict.score for verdict in found] == pytest.approx([1.2, 0.2, 0.0])
