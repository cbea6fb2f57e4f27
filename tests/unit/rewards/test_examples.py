"""Every rewarder of ours: its own examples, and a look at it as a user's template."""

import ast
import asyncio
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.base.errors import UserError
from spmd_rl.base.targets import build_target
from spmd_rl.sidecar.services import service_factories
from spmd_rl.types import AnswerInfo
from tests.patience import patient
from tests.unit.rewards.helpers import ROOT, score, server
from tests.unit.rewards.reward_models import looks_for_a_four

FILES = sorted(path for path in (ROOT / "rewards").glob("*.py") if path.stem != "__init__")
LEAVES = {"spmd_rl.types", "spmd_rl.base.code_answer"}
PARTS = {
    "correct": {"target": "rewards.math_verify:MathReward"},
    "form": {"target": "rewards.format:FormatReward", "args": {"form": "boxed"}, "weight": 0.1},
}


@pytest.fixture(scope="module")
def args(tmp_path_factory) -> Iterator[dict[str, dict[str, Any]]]:
    """By file, for rewarders that cannot be built without."""

    def judge(body: Any) -> Any:
        content = body["messages"][0]["content"]
        truth, answer = (content.split(f"{name}:\n")[1].split("\n\n")[0] for name in ("Reference answer", "judge"))
        return {"choices": [{"message": {"content": "YES" if truth in answer else "NO"}}]}

    with (
        server(judge) as (judge_url, _),
        server(lambda b: {"score": b["prompt"]["ground_truth"] in b["answer"] and 1.0 or 0.0}) as (url, _),
    ):
        yield {
            "judge": {"url": judge_url, "model": "m"},
            "remote": {"url": url},
            "composite": {"parts": PARTS},
            "math_verify": {"seconds": patient(5.0)},
            "reward_model": {"model": str(looks_for_a_four(tmp_path_factory.mktemp("model")))},
        }


def rewarders(path: Path) -> list[type]:
    module = importlib.import_module(f"rewards.{path.stem}")
    classes = inspect.getmembers(module, inspect.isclass)
    return [cls for _, cls in classes if cls.__module__ == module.__name__ and hasattr(cls, "examples")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples(path, args):
    (cls,) = rewarders(path)
    scores = set()
    try:
        target, given = f"rewards.{path.stem}:{cls.__name__}", args.get(path.stem, {})
        rewarder = build_target("reward.x", target, given, services=service_factories("x", "auto"))
    except UserError as error:
        pytest.skip(str(error)) if ".sandbox" in str(error) else pytest.fail(str(error))
    for prompt, answer, expected in cls.examples():
        info = AnswerInfo(len(answer.split()), "stop")
        verdict = asyncio.run(score(rewarder, prompt, answer, info))
        assert verdict.scored and verdict.score == expected, (prompt.ground_truth, answer, verdict)
        scores.add(expected)
    assert len(scores) > 1, "examples must hold right and wrong answers"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_rewarder_is_a_file_one_can_copy(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 300
    for node in ast.walk(ast.parse(source)):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            assert module.split(".")[0] not in {"spmd_rl", "envs", "rewards"} or module in LEAVES, module
