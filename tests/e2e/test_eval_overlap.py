"""`eval.overlap=true` through the real door: the same training to the bit, and the same numbers one line later."""

import json
import os
import signal

import pytest
import torch

from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.test_agents import AgentToy

SETTINGS = (*EXACT, "steps=5", "rollout.max_new_tokens=12", "engine.max_running=8")
"""Evaluations after steps 0, 2, 4 and 5; an engine in which not all that a step asks for has room."""
WAITS = {0: 1, 2: 3, 4: 4, 5: 5}
"""The line in which each of them stands: there is no step to wait for after the last, nor a line of its own."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def apart(toy: Toy) -> Running:
    return toy.run(*SETTINGS, name="apart")


def held_out(run: Running, step: int) -> list:
    """The held-out answers that stand with a step, in order."""
    rows = map(json.loads, (run.run_dir / "samples" / f"eval-{step:06d}.jsonl").read_text().splitlines())
    found = [
        (row["ticket"], row["answer"], [turn["token_ids"] for turn in row["turns"]], row["verdict"]) for row in rows
    ]
    return sorted(found, key=lambda row: row[:2])


def assert_same(beside: Running, apart: Running) -> None:
    """Weights and samples to the bit; all held-out answers and what they come to, each once."""
    ours, theirs = beside.weights(5), apart.weights(5)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    for step in range(1, 6):
        tokens = [[[t["token_ids"] for t in one["turns"]] for one in run.samples(step)] for run in (beside, apart)]
        assert tokens[0] == tokens[1]
    lines = [{line["step"]: line for line in run.metrics()} for run in (beside, apart)]
    assert [line["step"] for line in beside.metrics()] == list(range(6))
    for step, later in WAITS.items():
        of_step, of_later = (
            {k: v for k, v in line.items() if k.startswith("val/")} for line in (lines[1][step], lines[0][later])
        )
        assert of_step == of_later and "val/score/mean" in of_step
        assert held_out(apart, step) == held_out(beside, later) != []
    with_numbers = {step for step, line in lines[0].items() if "val/score/mean" in line}
    assert with_numbers == {*WAITS.values()}


def test_training_is_the_same_to_the_bit_and_the_numbers_come_with_the_next_step(toy: Toy, apart: Running) -> None:
    assert_same(toy.run(*SETTINGS, "eval.overlap=true", name="beside"), apart)


@pytest.mark.parametrize("point", ["progress generate", pytest.param("enter save", marks=pytest.mark.slow)])
def test_a_killed_run_asks_again(toy: Toy, apart: Running, point: str) -> None:
    """In the step that an evaluation is beside, whose numbers no checkpoint holds yet."""
    name = f"killed-{point.replace(' ', '-')}"
    run = toy.linger(point, *SETTINGS, "eval.overlap=true", name=name, torchrun=True, step=3)
    run.wait_for(point, step=3)
    os.kill(run.pid("rank-0"), signal.SIGKILL)
    assert run.wait(60) != 0
    assert not run.outlived(2.0), "a process outlived its run"
    assert "val/score/mean" not in run.metrics()[2]
    assert_same(toy.run(*SETTINGS, "eval.overlap=true", name=name), apart)


@pytest.mark.slow
def test_agents_play_the_same_episodes(tmp_path) -> None:
    """After a warm-up that generates nothing, beside which no evaluation could be."""
    toy = AgentToy(tmp_path, max_position_embeddings=2048)
    settings = ("steps=4", "eval.every=2", "env.echo.workers=2")
    apart, beside = toy.run(*settings, name="apart"), toy.run(*settings, "eval.overlap=true", name="beside")
    for step in range(1, 5):
        tokens = [[[t["token_ids"] for t in one["turns"]] for one in run.samples(step)] for run in (beside, apart)]
        assert tokens[0] == tokens[1]
    ours, theirs = beside.weights(4), apart.weights(4)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    for step, later in ((0, 0), (2, 3), (4, 4)):
        assert held_out(apart, step) == held_out(beside, later) != []
        assert apart.metrics()[step]["val/score/mean"] == beside.metrics()[later]["val/score/mean"]
