"""kill -9 in every phase: the same line typed again ends bitwise where an undisturbed run ends.

The runs that are struck linger for a moment where they are to be struck (`lingering_rlvr.py`); the undisturbed run and
the ones that continue are the plain door.
"""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from bench.gpu.same import MEASURED
from tests.e2e.runs import EXACT, Running, Toy

POINTS = {
    "publish": "progress publish",
    "generate": "progress generate",
    "score": "enter score",
    "prepare": "collective prepare: samples",
    "update": "collective update: backward of micro-batch 1/1",
    "save": "progress save",
}
"""Where each phase is struck: between two weights handed over, two engine steps, ..., two tensors written."""
MORE_POINTS = {
    "update": "collective update: gradient norm and averages",
    "save": "collective save: publish",
    "eval": "progress eval",
}
FATAL = [(victim, phase, point) for victim in ("rank-0", "rank-1", "agent") for phase, point in POINTS.items()]
FATAL += [("rank-0", phase, point) for phase, point in MORE_POINTS.items()]
HARMLESS = [("host", phase, point) for phase, point in POINTS.items()]
HARMLESS += [("worker", phase, POINTS[phase]) for phase in ("generate", "score")]
QUICK = {("rank-0", "save"), ("agent", "generate"), ("host", "score"), ("worker", "score")}
"""What `make test` runs; `make test-slow` runs the others."""
SETTINGS = (*EXACT, "steps=3", "reward.toy.args.sleep=0.01")


def cases(victims: list[tuple[str, str, str]]) -> list:
    """Parameters, the ones that `make test` leaves out marked `slow`."""
    return [
        pytest.param(
            *case,
            marks=() if case[:2] in QUICK and case[2] in POINTS.values() else pytest.mark.slow,
            id=f"{case[0]}-{case[2].replace(' ', '-')}",
        )
        for case in victims
    ]


def strike(toy: Toy, name: str, victim: str, point: str, *overrides: str, ranks: int = 2) -> Running:
    """A run whose victim was killed at the point. Rank 0 dies without an agent that would end the others, except where
    they wait for its answers: that is a stall, which takes longer. A sidecar's death ends nothing."""
    waited_for = victim == "rank-0" and point.endswith((" generate", " score"))
    rank = int(victim.removeprefix("rank-")) if victim.startswith("rank-") else 0
    agent = victim == "agent" or rank > 0 or waited_for
    run = toy.linger(point, *SETTINGS, *overrides, name=name, ranks=ranks, torchrun=agent)
    run.wait_for(point, rank=rank)
    os.kill(run.pid(victim), signal.SIGKILL)
    return run


def assert_undisturbed(run: Running, straight: Running) -> None:
    """Weights to the bit, samples and measurements of all steps; no ticket skipped or used twice."""
    ours, theirs = run.weights(3), straight.weights(3)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert [m["step"] for m in run.metrics()] == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert run.samples(step) == straight.samples(step)
    for mine, other in zip(run.metrics(), straight.metrics(), strict=True):
        assert {key: mine.get(key) for key in MEASURED} == {key: other.get(key) for key in MEASURED}
    used = [(s["ticket"], s["answer"]) for step in (1, 2, 3) for s in run.samples(step)]
    tickets = max(ticket for ticket, _ in used) + 1
    assert used == [(ticket, answer) for ticket in range(tickets) for answer in range(4)]


@pytest.mark.parametrize(("victim", "phase", "point"), cases(FATAL))
def test_a_killed_run_continues_as_if_nothing_had_happened(
    toy: Toy, straight: Running, victim: str, phase: str, point: str, record_property: Callable
) -> None:
    name = f"{victim}-{point.replace(' ', '-').replace('/', '-')}"
    run = strike(toy, name, victim, point)
    killed = time.time()
    assert run.wait(60) != 0
    record_property("dead_after", time.time() - killed)
    assert not run.outlived(2.0), "a process outlived its run"
    record_property("all_gone_after", time.time() - killed)
    if victim != "agent":
        last, (event, _, what) = run.events(int(victim[-1]))[-1], point.partition(" ")
        assert last["event"] == event and what in (last.get("phase"), last.get("name")), f"struck elsewhere: {last}"
    record_property("said", run.text().strip().splitlines()[-1])
    run = toy.run(*SETTINGS, name=name)
    record_property("first_step_again", next(e["step"] for e in again(run) if e["event"] == "step"))
    assert_undisturbed(run, straight)


def again(run: Running) -> list[dict]:
    """The journal of rank 0 since its last start."""
    events = run.events(0)
    begin = max(i for i, e in enumerate(events) if e["event"] == "start")
    return events[begin:]


@pytest.mark.parametrize(("victim", "phase", "point"), cases(HARMLESS))
def test_a_killed_sidecar_changes_nothing(
    toy: Toy, straight: Running, victim: str, phase: str, point: str, record_property: Callable
) -> None:
    run = strike(toy, f"{victim}-{phase}", victim, point)
    killed = time.time()
    assert run.wait(60) == 0, run.text()[-3000:]
    record_property("ended_after", time.time() - killed)
    assert not run.outlived(2.0), "a process outlived its run"
    assert victim != "host" or run.text().count("the host died by SIGKILL; starting a new one") == 1
    assert_undisturbed(run, straight)
