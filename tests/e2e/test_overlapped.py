"""`placement.mode=overlapped` through the real door: one step off at most, and the same again to the bit."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import EXACT, Running, Toy

ALL = (*EXACT, "rollout.over_sample=0")
"""Nothing spare: what a filter drops is drawn anew, when verdicts have come."""
SETTINGS = (*ALL, "steps=3", "placement.mode=overlapped")


@pytest.fixture(scope="module")
def overlapped(toy: Toy) -> Running:
    """Three steps of two ranks: the reference."""
    return toy.run(*SETTINGS, name="overlapped")


def tokens(run: Running, step: int) -> list:
    return [(s["ticket"], s["answer"], [turn["token_ids"] for turn in s["turns"]]) for s in run.samples(step)]


def lags(run: Running, step: int) -> set[int]:
    return {step - 1 - version for s in run.samples(step) for turn in s["turns"] for version in turn["versions"]}


def assert_same(run: Running, other: Running, steps: tuple[int, ...] = (1, 2, 3)) -> None:
    """Samples and weights, to the bit."""
    assert all(tokens(run, step) == tokens(other, step) for step in steps)
    ours, theirs = run.weights(steps[-1]), other.weights(steps[-1])
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_it_is_one_step_off_and_uses_every_ticket_once(toy: Toy, overlapped: Running) -> None:
    colocated = toy.run(*ALL, "steps=1", name="colocated")
    assert_same(overlapped, colocated, steps=(1,))
    assert lags(overlapped, 1) == {0}
    assert [1 in lags(overlapped, step) for step in (2, 3)] == [True, True]
    assert lags(overlapped, 2) | lags(overlapped, 3) == {0, 1}  # 0: in the place of filtered groups
    lines = overlapped.metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line.get("rollout/lag/max") for line in lines] == [None, None, 1, 1]
    assert all(line["placement/overlap_seconds"] > 0 for line in lines[2:])
    used = [(s["ticket"], s["answer"]) for step in (1, 2, 3) for s in overlapped.samples(step)]
    assert len(used) == len(set(used)) and {ticket for ticket, _ in used} == set(range(max(used)[0] + 1))
    assert overlapped.text().count("the next step before it trains") == 1


def test_a_rerun_is_the_same_to_the_bit_however_late_verdicts_are(toy: Toy, overlapped: Running) -> None:
    assert_same(toy.run(*SETTINGS, "reward.toy.args.sleep=0.02", name="rerun"), overlapped)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["progress generate", "enter update", "enter save"])
def test_a_killed_run_continues_with_the_weights_of_its_checkpoint(toy: Toy, overlapped: Running, point: str) -> None:
    name = f"killed-{point.replace(' ', '-')}"
    run = toy.linger(point, *SETTINGS, name=name, torchrun=True)
    run.wait_for(point)
    os.kill(run.pid("rank-0"), signal.SIGKILL)
    assert run.wait(60) != 0
    assert not run.outlived(2.0), "a process outlived its run"
    kept = run.run_dir / "checkpoints" / "latest"
    begun = int(kept.read_text().rpartition("-")[2]) if kept.exists() else 0
    again = toy.run(*SETTINGS, name=name)
    assert [line["step"] for line in again.metrics()] == [0, 1, 2, 3]
    assert tokens(again, 1) == tokens(overlapped, 1)
    assert lags(again, begun + 1) == {0}, "nothing was begun ahead of the first step after a start"
    used = [(s["ticket"], s["answer"]) for step in (1, 2, 3) for s in again.samples(step)]
    assert len(used) == len(set(used)) and {ticket for ticket, _ in used} == set(range(max(used)[0] + 1))


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["none", "defer"])
def test_it_runs_with_the_store(toy: Toy, tail: str) -> None:
    settings = (
        "rollout.claim=store",
        "rollout.over_sample=2",
        f"rollout.tail={tail}",
        "reward.toy.args.sleep=0.02",
        "steps=6",
    )
    run = toy.run(*SETTINGS, *settings, name=f"store-{tail}")
    assert all(lags(run, step) <= {0, 1} for step in range(1, 7))
    used = [(s["ticket"], s["answer"]) for step in range(1, 7) for s in run.samples(step)]
    trained = [(s["ticket"], s["answer"], s["reject_reason"]) for step in range(1, 7) for s in run.samples(step)]
    taken = [key for *key, reason in trained if reason != "surplus"]
    assert used and len(taken) == len(set(map(tuple, taken)))


def test_what_it_cannot_keep_is_refused(toy: Toy, tmp_path: Path) -> None:
    for setting, line in (
        ("placement.max_staleness=2", "placement.max_staleness: must be 1 with overlapped"),
        ("rollout.partial_rollout=true", "rollout.partial_rollout: its tokens could be older"),
    ):
        run = toy.start(*SETTINGS, setting, ranks=0, name="refused")
        assert run.wait() == 2
        assert line in run.text()
