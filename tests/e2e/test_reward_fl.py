"""Reward feedback from the door: it learns, resumes to the bit after kill -9, and its mistakes are named."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from spmd_rl.model.diffusion.tiny import build_tiny
from tests.e2e.runs import Running, Toy
from tests.pictures import SETTINGS


class Squares(Toy):
    """A tiny diffusion model that is hardly trained."""

    door = "spmd_rl.reward_fl"

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, path / "model"
        build_tiny(self.model, updates=2)

    def settings(self) -> list[str]:
        more = ["steps=3", "eval.every=1", "eval.per_prompt=2", "checkpoint.every=1", "checkpoint.keep=9"]
        return [*SETTINGS, f"policy.model={self.model}", "journal.stall_seconds=60", *more]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Squares:
    return Squares(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="module")
def straight(toy: Squares) -> Running:
    return toy.run("feedback=flow_grpo", name="straight")


def measured(run: Running) -> list[dict]:
    """The lines of a run, without what depends on the clock."""
    clocks = ("time/", "system/", "memory/")
    return [{key: value for key, value in line.items() if not key.startswith(clocks)} for line in run.metrics()]


def test_a_run_writes_pictures_samples_a_report_and_an_export(toy: Squares, straight: Running) -> None:
    lines = straight.metrics()
    assert len(lines) == 4 and all(line["actor/ratio"] == 1.0 for line in lines[1:])
    folder = straight.run_dir
    row = straight.samples(1)[0]
    assert (folder / row["turns"][0]["text"]).read_bytes().startswith(b"\x89PNG") and row["advantage"] is not None
    assert "data:image/png;base64," in (folder / "report.html").read_text()
    exported = folder / "checkpoints" / "step-000003" / "hf"
    assert json.loads((exported / "config.json").read_text())["model_type"] == "tiny_flow"
    assert (exported / "model.safetensors").is_file()


def test_killed_and_started_again_it_is_the_same_to_the_bit(toy: Squares, straight: Running) -> None:
    run = toy.linger("enter update", "feedback=flow_grpo", name="killed")
    run.wait_for("enter update")
    os.kill(run.pid("rank-1"), signal.SIGKILL)
    assert run.wait() != 0
    again = toy.run("feedback=flow_grpo", name="killed")
    assert measured(again) == measured(straight)
    wanted, found = straight.weights(3), again.weights(3)
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_failing_reward_excludes_its_sample_and_too_many_end_the_run(toy: Squares) -> None:
    target = "reward.shapes.target=tests.pictures:FailsForOne"
    run = toy.run("feedback=nft", target, "steps=1", "eval.every=0", "reward.error_budget=0.5", name="failing")
    line = run.metrics()[-1]
    assert 0 < line["rollout/error_share"] < 0.5 and "got no score; the first:" in run.text()
    strict = toy.start("feedback=nft", target, "steps=1", "eval.every=0", name="strict")
    assert strict.wait() == 1 and "reward.error_budget" in strict.text()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["feedback=refl", "feedback.reward.target=null"], "feedback.reward.target: loss=refl follows the gradient"),
        (["policy.model=/nowhere"], "policy.model: /nowhere holds no diffusion model"),
        (["pictures.height=64"], "pictures.height"),
        (["train.updates_per_step=9"], "train.updates_per_step: 9 of only 4 micro-batches"),
        (["train.tp=2"], "train.tp"),
    ],
)
def test_a_mistake_is_one_line(toy: Squares, more: list[str], line: str) -> None:
    run = toy.start(*more, ranks=0, name=more[0].partition("=")[0])
    assert run.wait() == 2 and line in run.text()
