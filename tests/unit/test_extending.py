"""The examples of docs/EXTENDING.md, each as a file of a user's own: they do what the page says of them."""

import asyncio
import importlib
import re
import sys
from array import array
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from spmd_rl.config.algorithm_targets import check_algorithm
from spmd_rl.config.load import load
from spmd_rl.config.schema import AlgorithmConfig, RlvrConfig
from spmd_rl.sidecar.env_replies import checked_reset, checked_step
from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict
from tests.unit.test_own_algorithm import SCORED, TOKENS

PAGE = (Path(__file__).parents[2] / "docs" / "EXTENDING.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
PROMPT = Prompt("0" * 32, (Message("user", "2 + 2?"),), "math", "4")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch):
    """Import one of the page's files."""

    def written(name: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(FILES[name])
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return written


def test_every_python_block_is_a_file_that_is_run_here() -> None:
    assert len(FILES) == PAGE.count("```python")
    assert set(FILES) == {"my_reward", "my_env", "my_episode", "my_algorithm", "sums"}


def test_the_pipeline_is_that_of_test_own_pipeline() -> None:
    assert FILES["sums"] == (Path(__file__).parents[1] / "e2e" / "own" / "sums.py").read_text()


def test_the_reward(mine) -> None:
    module = mine("my_reward")
    assert module.score("so \\boxed{4}.", "4") and not module.score("\\boxed{4} or \\boxed{5}", "4")
    verdict = module.ShortAnswer(0.25).score(PROMPT, "\\boxed{4}", AnswerInfo(2, "stop"))
    assert (verdict.status, verdict.score, verdict.parts) == ("ok", 0.5, {"right": 1.0})


def test_the_environment(mine) -> None:
    env = mine("my_env").Parity()
    for seed in range(4):
        first = checked_reset(env.reset(seed))
        assert first == checked_reset(env.reset(seed)) and first.info["instruction"]
        (right,) = env.solution()
        assert checked_step(env.step(right)).reward == 1
        assert checked_step(env.step("")).done and checked_step(env.step("")).reward == 0


@pytest.mark.parametrize("scores", [[1.0], [0.0, 1.0]])
def test_the_episode(mine, scores: list[float]) -> None:
    module, asked = mine("my_episode"), []
    verdicts = iter([Verdict("ok", score) for score in scores])

    async def generate(ids):
        asked.append(ids)
        return SimpleNamespace(text="4")

    async def score(text):
        return next(verdicts)

    ctx = SimpleNamespace(
        prompt=PROMPT,
        render=lambda messages: array("i", [1]),
        reply=lambda messages: array("i", [2]),
        generate=generate,
        score=score,
        sample=lambda verdict: verdict.score,
    )
    assert asyncio.run(module.second_chance(ctx)) == scores[-1]
    assert [ids[0] for ids in asked] == [1, 2][: len(scores)]


def test_the_algorithm(mine) -> None:
    module = mine("my_algorithm")
    settings = AlgorithmConfig(
        advantage="my_algorithm:centred", loss="my_algorithm:soft_clip", clip_high=0.3, args={"sharpness": 2.0}
    )
    check_algorithm(settings)
    assert module.centred(SCORED).tolist() == [0.5, -0.5, -0.5, 0.5]
    loss, metrics = module.soft_clip(TOKENS, clip_high=0.3, sharpness=2.0)
    (gradient,) = torch.autograd.grad(loss.sum(), TOKENS.logprobs)
    assert gradient.sign().tolist() == [-1, -1, 1] and metrics["soft_clip/ratio"][2] == 1


def test_the_recipe(mine, tmp_path: Path) -> None:
    mine("my_algorithm")
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "centred.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    cfg = load("rlvr", RlvrConfig, ["+experiment=demo", "algorithm=centred"], str(tmp_path))
    assert (cfg.algorithm.name, cfg.algorithm.advantage) == ("centred", "my_algorithm:centred")
    assert cfg.algorithm.clip_high == 0.3
