"""kill -9 and SIGSTOP in every phase: the same line typed again ends bitwise where an undisturbed run ends."""

import os
import signal
import time

import pytest
import torch

from tests.e2e.runs import EXACT, Toy, gone

PHASES = ("publish", "generate", "score", "prepare", "update", "save")
VICTIMS = ("rank-0", "rank-1", "agent", "host")
QUICK = [("rank-1", "update"), ("rank-0", "save"), ("agent", "generate"), ("host", "score")]
"""What `make test` runs; `make test-slow` runs all pairs."""
SETTINGS = (*EXACT, "steps=3", "reward.toy.args.sleep=0.01")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def straight(toy: Toy):
    run = toy.start(*SETTINGS, name="straight")
    assert run.wait() == 0, run.text()[-3000:]
    return run


@pytest.mark.parametrize(
    ("victim", "phase"),
    [pytest.param(v, p, marks=() if (v, p) in QUICK else pytest.mark.slow) for v in VICTIMS for p in PHASES],
)
def test_killed_and_continued(toy: Toy, straight, victim: str, phase: str) -> None:
    name = f"{victim}-{phase}"
    run = toy.start(*SETTINGS, name=name)
    run.wait_for(phase, step=2)
    family = run.family()
    os.kill(run.pid(victim), signal.SIGKILL)
    code = run.wait(60)
    if victim == "host":
        assert code == 0, f"a dead sidecar host is no rank's failure:\n{run.text()[-3000:]}"
    else:
        assert code != 0
        time.sleep(0.1)
    assert not gone(family, 2.0), "a process outlived its run"
    if code:
        run = toy.start(*SETTINGS, name=name)
        assert run.wait() == 0, run.text()[-3000:]
    ours, theirs = run.weights(3), straight.weights(3)
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert [m["step"] for m in run.metrics()] == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert run.samples(step) == straight.samples(step)
    for mine, other in zip(run.metrics(), straight.metrics(), strict=True):
        key = "train_infer/abs_diff/mean"
        assert mine.get(key) == other.get(key)
    tickets = [s["ticket"] for step in (1, 2, 3) for s in run.samples(step) if s["why_not"] != "surplus"]
    assert sorted(set(tickets)) == list(range(max(tickets) + 1)), "a prompt was skipped"


STALL = 4


@pytest.mark.parametrize(
    "phase", [pytest.param(p, marks=() if p in ("generate", "update") else pytest.mark.slow) for p in PHASES]
)
def test_a_stopped_rank_ends_the_job_and_is_named(toy: Toy, phase: str) -> None:
    run = toy.start(*SETTINGS, f"journal.stall_seconds={STALL}", name=f"stop-{phase}")
    run.wait_for(phase, step=2, rank=1)
    family = run.family()
    os.kill(run.pid("rank-1"), signal.SIGSTOP)
    stopped = time.time()
    assert run.wait(60) != 0
    assert time.time() - stopped < STALL + 5
    assert not gone(family, 2.0), "a process outlived its run"
    report = (run.run_dir / "hang.txt").read_text()
    assert "rank 1" in report and "rank-1" not in report.splitlines()[0]
    assert any(p in report for p in PHASES), report
    assert report in run.text() or report.splitlines()[0] in run.text()
