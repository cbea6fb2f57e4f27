"""`--dry-run`: what it says, and that it writes nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.config.load import load
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.dry_run import show
from spmd_rl.errors import UserError
from tests.models import tiny

REWARD = """
from spmd_rl.types import Message, Prompt, Verdict
class Boxed:
    @classmethod
    def examples(cls):
        prompt = Prompt("0" * 32, (Message("user", "?"),), "math", "4")
        yield from ((prompt, "boxed{4}", 1.0), (prompt, "4", 0.0))
    def score(self, prompt, answer, info):
        return Verdict("ok", float("boxed{" + prompt.ground_truth + "}" in answer))
class Never:
    def score(self, prompt, answer, info):
        return Verdict("ok", 0.0)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dry")
    tiny("llama", place / "model")
    (place / "dry_judges.py").write_text(REWARD)
    rows = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(20)] + [
        {"question": "x" * 60, "answer": "1"}
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def line(place: Path, target: str = "Boxed") -> list[str]:
    return [
        "data=jsonl_math", f"data.train={place}/rows.jsonl", "data.format={question}", f"policy.model={place}/model",
        f"reward.math.target=dry_judges:{target}", f"run.dir={place}/run", "rollout.prompts_per_step=4",
        "rollout.answers_per_prompt=2", "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=8", "steps=10",
        "data.holdout=1e-9", "train.updates_per_step=2", "checkpoint.every=4",
    ]  # fmt: skip


def said(place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, target: str) -> str:
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("WORLD_SIZE", "2")
    show(load("rlvr", RlvrConfig, line(place, target)))
    return " ".join(capsys.readouterr().out.split())


def test_the_arithmetic_of_a_step(place: Path, capsys, monkeypatch) -> None:
    text = said(place, capsys, monkeypatch, "Boxed")
    for part in (
        "21 for training, 0 held out",
        "math 2 of its own 2 examples score as they do with default arguments",
        "; 1 of 21 are longer (data.overlong=drop)",
        "4 prompts x 2 answers = 8 samples",
        "4 a replica, 4 a data shard",
        "2 a step of 4 samples, 20 in all; each at most 1 micro-batches of 4096 tokens a data shard",
        "5 steps make one; 10 steps use 40 prompts = 2.00",
        "after steps 4, 8, 10",
        f"run.dir {place}/run",
    ):
        assert part in text


def test_prompts_answers_and_rewards(place: Path, capsys, monkeypatch) -> None:
    text = said(place, capsys, monkeypatch, "Boxed")
    assert "<|im_start|>user 0 + 0?<|im_end|> <|im_start|>assistant" in text
    assert "\\boxed{0}<|im_end|>" in text and "reward of '2': 0 (ok)" in text
    assert "! it scores more as '\\\\boxed{0}', 1 (ok): does data.format ask for that?" in text
    assert "! this answer has 10 tokens, more than rollout.max_new_tokens=8" in text
    assert "! no form of the ground truth scores more than a wrong answer" in said(place, capsys, monkeypatch, "Never")


def test_it_writes_nothing_and_needs_no_torch(place: Path) -> None:
    before = {path for path in place.rglob("*") if "__pycache__" not in path.parts}
    code = "import atexit, runpy, sys; atexit.register(lambda: print('torch:', 'torch' in sys.modules));"
    code += "sys.argv[0] = 'rlvr'; runpy.run_module('spmd_rl.rlvr', run_name='__main__')"
    env = {**os.environ, "PYTHONPATH": f"{place}:{os.getcwd()}"}

    command = [sys.executable, "-c", code, "--dry-run", *line(place)]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("torch: False\n"), done.stderr
    assert {path for path in place.rglob("*") if "__pycache__" not in path.parts} == before


def test_an_evaluation(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    given = ["data.train=", f"data.eval={place}/rows.jsonl", "steps=0", "eval.answers=3"]
    show(load("rlvr", RlvrConfig, [*line(place, "Boxed"), *given]))
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "0 for training, 21 held out, 0 dropped",
        "; 1 of 21 are longer (data.overlong=drop)",
        "evaluation 21 of 21 held-out prompts x (3 sampled, 1 greedy) once, and nothing is trained",
        "reward of",
        "checkpoints none: nothing is trained",
    ):
        assert part in text
    assert " updates " not in text and " epochs " not in text


@pytest.mark.parametrize("given", [["rollout.max_prompt_tokens=5"], ["data.overlong=error"]])
def test_a_mistake_ends_it_as_it_would_end_the_run(place: Path, given: list[str]) -> None:
    with pytest.raises(
        UserError, match=r"^rollout.max_prompt_tokens=\d+: (21|1) of 21 prompts are longer, the longest"
    ):
        show(load("rlvr", RlvrConfig, [*line(place), *given]))
