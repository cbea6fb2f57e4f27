"""A rank that stops, or that stays away from a collective: the job ends soon and says where, which and who."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.test_kills import POINTS
from tests.patience import patient

STALL = 4
SETTINGS = (
    *EXACT,
    "steps=3",
    "reward.toy.args.sleep=0.01",
    "reward.toy.timeout=3",
    f"journal.stall_seconds={STALL}",
    "checkpoint.every=2",
)
SKIPPING = Path(__file__).with_name("skipping_rlvr.py")
CASES = [(victim, phase) for victim in ("rank-0", "rank-1") for phase in POINTS]
"""In `make test` a stopped rank under torchrun is that of `tests/dist/test_fate`."""
AWAITED = {
    "publish": "publish: weights",
    "generate": "generate: end of step",
    "score": "generate: end of step",
    "prepare": "prepare: samples",
    "update": "update: backward of micro-batch 1/1",
    "save": "save: policy",
}
"""The collective in which the others wait for a rank that stopped in the phase."""


def ended_by_a_stall(run: Running) -> str:
    """Wait for the end of a job that hangs; its report."""
    hung = time.time()
    assert run.wait(60) != 0
    assert time.time() - hung < patient(STALL + 5), run.text()[-3000:]
    assert not run.outlived(2.0), "a process outlived its run"
    report = (run.run_dir / "hang.txt").read_text()
    assert report.strip() in run.text()
    return report


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_a_stopped_rank_ends_the_job_and_is_named(toy: Toy, victim: str, phase: str, record_property: Callable) -> None:
    run = toy.linger(POINTS[phase], *SETTINGS, name=f"{victim}-{phase}", torchrun=True)  # whose agent kills the stopped
    run.wait_for(POINTS[phase], rank=int(victim[-1]))
    os.kill(run.pid(victim), signal.SIGSTOP)
    stopped = time.time()
    report = ended_by_a_stall(run)
    record_property("gone_after", time.time() - stopped)
    record_property("report", report)
    lines = [line.strip() for line in report.splitlines()]
    assert f"{STALL} s (journal.stall_seconds)" in lines[0]
    shown = {"prepare": "coordination", "score": "generate"}.get(phase, phase)
    assert lines[1] == f"step 2, phase: {shown}"
    assert lines[2].startswith(f"collective: '{AWAITED[phase]}'")
    assert lines[3] == f"arrived: rank {1 - int(victim[-1])}"
    assert lines[4] == f"did not arrive: {victim.replace('-', ' ')}"
    assert lines[5].startswith(f"{victim.replace('-', ' ')} (pid") and "stopped, dead or cut off; no stack" in lines[5]


def skip(toy: Toy, collective: str, name: str) -> Running:
    return toy.start(*SETTINGS, name=name, script=SKIPPING, env={"SKIP": collective})


def test_a_rank_that_skips_a_collective_inside_a_library_is_named(toy: Toy, record_property: Callable) -> None:
    run = skip(toy, "update: forward of micro-batch 1/1", "skips-forward")
    run.wait_for("collective update: gradient norm and averages", rank=1)
    report = ended_by_a_stall(run)
    record_property("report", report)
    assert "phase: update" in report
    assert "collective: 'update: backward of micro-batch 1/1'" in report  # forward, weights were still gathered
    assert "arrived: rank 0\n" in report and "did not arrive: rank 1\n" in report
    assert "in collective 'update: gradient norm and averages'" in report


@pytest.mark.slow
def test_ranks_in_different_collectives_of_our_own_are_told_so(toy: Toy, record_property: Callable) -> None:
    run = skip(toy, "track: metrics", "skips-gather")
    began = time.time()
    assert run.wait(60) != 0
    record_property("gone_after", time.time() - began)
    assert not run.outlived(2.0), "a process outlived its run"
    lines = [line for line in run.text().splitlines() if "ranks are in different collectives" in line]
    record_property("said", lines[0])
    assert "ranks [0] in 'gather track: metrics'" in lines[0]
    assert "ranks [1] in 'gather save: state'" in lines[0]
