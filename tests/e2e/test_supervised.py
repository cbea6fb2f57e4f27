"""The pipelines over written rows: they learn, resume to the bit after kill -9, and name a wrong row before torch."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.browser import data_in
from tests.e2e.runs import ROOT, Running, Toy

POINTS = ["enter data", "collective prepare: samples", "collective update: gradient norm and averages", "progress save"]
"""Where runs are killed in step 2."""
NO_TORCH = """
import atexit, runpy, sys
atexit.register(lambda: print("torch" in sys.modules))
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


class Written(Toy):
    """A tiny model and rows whose answers are the question again."""

    metric, fall = "sft/loss", 0.9
    own = ("eval.rows=3",)

    def __init__(self, path: Path, pipeline: str = "sft") -> None:
        super().__init__(path)
        self.door = f"spmd_rl.{pipeline}"
        self.data.write_text("".join(json.dumps(self.row(number)) + "\n" for number in range(23)))

    def row(self, number: int) -> dict:
        return {"prompt": f"say {number}", "completion": f"{number} " * (1 + number % 5)}

    def settings(self) -> list[str]:
        given = ["steps=4", "data.rows_per_step=6", "data.holdout=0.2", "eval.every=2", *self.own]
        model = [f"policy.model={self.model}", f"data.train={self.data}", "policy.dtype=float32", "policy.lr=1e-2"]
        return [*model, *given, "checkpoint.every=1", "checkpoint.keep=9", "journal.stall_seconds=60"]


class Pairs(Written):
    metric = "dpo/loss"
    own = ("policy.lr=1e-3",)

    def row(self, number: int) -> dict:
        return {"prompt": f"say {number}", "chosen": f"{number} " * (1 + number % 3), "rejected": "no"}


class Votes(Pairs):
    own, fall = ("policy.lr=1e-3", "preference.loss=kto"), 0.95

    def row(self, number: int) -> dict:
        if number % 3 == 0:
            return super().row(number)
        answer = f"{number} " if number % 3 == 1 else "never"
        return {"prompt": f"say {number}", "completion": answer, "label": number % 3 == 1}


class Ranked(Pairs):
    metric = "reward_model/loss"
    own, fall = ("policy.lr=1e-3", "center_coef=0.01"), 0.97

    def row(self, number: int) -> dict:
        return super().row(number) | {"margin": 0.5}


class Steps(Pairs):
    metric = "reward_model/loss"
    own, fall = ("policy.lr=3e-3", "head=process"), 0.9

    def row(self, number: int) -> dict:
        steps = [str(number)] * (1 + number % 3) + ["never"] * (number % 4 == 0)
        return {"prompt": f"say {number}", "completions": steps, "labels": [step != "never" for step in steps]}


KINDS = {
    "sft": (Written, "sft"),
    "dpo": (Pairs, "dpo"),
    "kto": (Votes, "dpo"),
    "reward_model": (Ranked, "reward_model"),
    "process": (Steps, "reward_model"),
}


@pytest.fixture(scope="module", params=KINDS)
def toy(request, tmp_path_factory) -> Written:
    kind, pipeline = KINDS[request.param]
    return kind(tmp_path_factory.mktemp(request.param), pipeline)


@pytest.fixture(scope="module")
def straight(toy: Written) -> Running:
    return toy.run(name="straight")


def measured(run: Running) -> list[dict]:
    """The lines of a run, without what depends on the clock."""
    kept = ("actor/", "critic/", "data/", "sft/", "rewards/", "logps/", "dpo/", "reward_model/", "val/")
    lines = [{key: value for key, value in line.items() if key.startswith(kept)} for line in run.metrics()]
    assert [line["step"] for line in run.metrics()] == list(range(len(lines)))
    return lines


def test_it_learns_and_evaluates(toy: Written, straight: Running) -> None:
    lines = measured(straight)
    assert lines[4][toy.metric] < toy.fall * lines[1][toy.metric]
    assert [step for step, line in enumerate(lines) if "val/loss" in line] == [0, 2, 4]
    assert lines[4]["val/loss"] < toy.fall * lines[0]["val/loss"]
    assert "warning" not in straight.text().lower() and "held out" in straight.text()
    alone = measured(toy.run("steps=1", ranks=0, name="alone"))
    assert alone[1][toy.metric] == pytest.approx(lines[1][toy.metric], rel=1e-5)
    assert alone[0]["val/loss"] == pytest.approx(lines[0]["val/loss"], rel=1e-5)


def test_held_out_rows_are_logged_with_their_scores(toy: Written, straight: Running) -> None:
    text = (straight.run_dir / "samples" / "eval-000004.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert rows and all(row["reject_reason"] == "held out" and row["messages"] for row in rows)
    if toy.door == "spmd_rl.sft":
        written = [toy.row(number) for number in range(23)]
        shown = [(row["messages"][0]["content"], row["turns"][0]["text"]) for row in rows]
        assert len(rows) == 3 and all({"prompt": a, "completion": b} in written for a, b in shown)
        losses = [-row["verdict"]["score"] for row in rows]
        assert min(losses) < straight.metrics()[4]["val/loss"] < max(losses)
    assert data_in(straight.run_dir / "report.html")["step"]["."]["eval 4"]["rows"]


@pytest.mark.parametrize("point", [POINTS[0], *(pytest.param(point, marks=pytest.mark.slow) for point in POINTS[1:])])
def test_killed_and_started_again_it_is_the_same_to_the_bit(toy: Written, straight: Running, point: str) -> None:
    name = point.replace(" ", "-").replace(":", "")
    run = toy.linger(point, name=name, torchrun=True)  # whose agent ends the others
    run.wait_for(point)
    os.kill(run.pid("rank-1"), signal.SIGKILL)
    assert run.wait(60) != 0
    again = toy.run(name=name)
    assert "resumed from step" in again.text() and measured(again) == measured(straight)
    ours, theirs = again.weights(4), straight.weights(4)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_epochs_end_where_the_rows_end(toy: Written) -> None:
    run = toy.run("epochs=1.5", "eval.every=0", "policy.schedule=linear", name="epochs", ranks=0)
    rows = int(run.text().partition("rows ")[2].split()[0])
    lines = run.metrics()
    assert [line["step"] for line in lines[1:]] == list(range(1, -(-round(1.5 * rows) // 6) + 1))
    assert lines[-1]["data/epoch"] == pytest.approx(1.5, abs=0.6 / rows)
    assert lines[-1]["actor/lr"] == pytest.approx(lines[1]["actor/lr"] / len(lines[1:]))
    assert "already at step" in toy.run("epochs=1.5", "eval.every=0", "policy.schedule=linear", name="epochs").text()


def test_other_rows_are_not_the_ones_that_a_checkpoint_counts(toy: Written, straight: Running) -> None:
    text = toy.data.read_text()
    try:
        more = [json.dumps(toy.row(number)) + "\n" for number in range(40, 52)]  # some are not held out
        toy.data.write_text(text + "".join(more))
        other = toy.start("steps=5", name="straight")
        assert other.wait() == 2 and "data.train: its rows are not those" in other.text()
    finally:
        toy.data.write_text(text)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ([], "data.train: {path}/broken.jsonl:3: needs "),
        (["data.rows_per_step=0"], "data.rows_per_step: must be at least 1, not 0"),
        (["rollout.temperature=1"], "rollout.temperature: unknown key; python -m spmd_rl."),
        (["algorithm=grpo"], "algorithm=grpo: {pipeline} has no group algorithm"),
        (["data.keys.question=x"], "data.keys.question: rows have no such field; known: "),
    ],
)
def test_a_mistake_is_named_before_torch(toy: Written, more: list[str], line: str) -> None:
    good = json.dumps(toy.row(0))
    (toy.path / "broken.jsonl").write_text(f'{good}\n{good}\n{{"nothing": 1}}\n')
    given = [*toy.settings(), f"data.train={toy.path}/broken.jsonl", f"run.dir={toy.path}/wrong", *more]
    command = [sys.executable, "-c", NO_TORCH, toy.door, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr
    pipeline = toy.door.rpartition(".")[2]
    assert done.stderr.splitlines()[-1].startswith("error: " + line.format(path=toy.path, pipeline=pipeline))


def test_what_it_shows(toy: Written) -> None:
    shown = toy.run("--dry-run", ranks=0, name="shown").text()
    assert "what is learnt in colour" in shown and "for training" in shown and "say 1" in shown
    assert not (toy.path / "shown").exists()
    assert "rows_per_step: 6" in toy.run("--cfg", "job", ranks=0, name="printed").text()
