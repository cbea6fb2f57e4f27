"""A pipeline of a user's own is one file in a folder of his own (`own/sums.py`): no line of the package knows it."""

import json
import shutil

import pytest
import torch

from tests.e2e.runs import ROOT, Running, Toy

FILE = ROOT / "tests" / "e2e" / "own" / "sums.py"


class Sums(Toy):
    """Starts the user's file, which `python -m` finds on PYTHONPATH."""

    door = "sums"

    def settings(self) -> list[str]:
        tiny = [f"policy.model={self.model}", "policy.dtype=float32", "policy.lr=1e-2"]
        return [*tiny, "largest=4", "steps=4", "checkpoint.every=2", "journal.stall_seconds=60"]

    def start(self, *overrides: str, **how) -> Running:
        return super().start(*overrides, env={"PYTHONPATH": f"{ROOT}:{self.path}"}, **how)


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Sums:
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(FILE, folder)
    return Sums(folder)


@pytest.fixture(scope="module")
def straight(sums) -> Running:
    return sums.run(name="straight", torchrun=True)


def losses(run: Running) -> list[float]:
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["actor/pg_loss"] for line in lines]


def test_it_learns_from_forty_lines(sums, straight) -> None:
    assert len(FILE.read_text().splitlines()) <= 40
    found = losses(straight)
    assert len(found) == 4 and found[3] < 0.8 * found[0]
    assert losses(sums.run("steps=1", ranks=0, name="one process")) == pytest.approx(found[:1], rel=1e-5)
    said = straight.text()
    assert "2 on 1 node (cpu): each trains (fsdp2, tp=1)\n" in said and "warning: " not in said
    assert "already at step 4" in sums.run(name="straight").text()


def test_stopped_and_resumed_it_is_the_same_to_the_bit(sums, straight) -> None:
    sums.run("steps=2", name="resumed")
    resumed = sums.run(name="resumed")
    assert "resumed from step 2" in resumed.text()
    assert losses(resumed) == losses(straight)
    ours, theirs = resumed.weights(4), straight.weights(4)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_has_the_sections_that_it_has(sums, straight) -> None:
    wrong = sums.start("rollout.temperature=1", ranks=0, name="wrong")
    assert wrong.wait() == 2 and "error: rollout.temperature: unknown key" in wrong.text()
    changed = sums.start("largest=5", "steps=5", ranks=0, name="straight")
    assert changed.wait() == 2 and "error: largest: " in changed.text()
    shown = sums.run("--cfg", "job", ranks=0, name="shown").text()
    assert "largest: 4\n" in shown and "engine:" not in shown and "reward:" not in shown
