"""A long wait is told on rank 0: not at once, and not too often."""

import time

import pytest

from spmd_rl.base import waits
from spmd_rl.base.waits import report
from spmd_rl.track.messages import PhaseReporter


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Seconds as the waits see them, whose thread prints nothing."""
    now = [100.0]
    monkeypatch.setattr(waits, "report", lambda: None)
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    return now


def test_a_wait_in_a_library_is_told_from_a_thread(capsys) -> None:
    for rank in (0, 1):
        with waits.waiting("waiting for 2 ranks", rank == 0, first=0.0):
            time.sleep(0.9)
    assert capsys.readouterr().err == "waiting for 2 ranks ...\n"


@pytest.mark.parametrize(("rank", "lines"), [(0, 3), (1, 0)])
def test_a_long_wait_is_told_seldom_and_by_rank_0(clock, capsys, rank: int, lines: int) -> None:
    wait = waits.Wait(rank == 0)
    for _ in range(90):  # 90 s: at 20, 50 and 80
        wait("waiting for 14 verdicts (math)")
        report()
        clock[0] += 1.0
    wait.over()
    wait("waiting for 3 verdicts (code)")  # another wait begins
    report()
    wait.over()
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == lines
    assert not printed or printed[0] == "waiting for 14 verdicts (math) (20 s)"


def test_of_two_waits_the_inner_one_is_told(clock, capsys) -> None:
    with waits.waiting("outer"):
        clock[0] += 25.0
        with waits.waiting("inner"):
            clock[0] += 15.0
            report()
            clock[0] += 10.0
            report()
        report()
    clock[0] += 99.0
    report()
    assert capsys.readouterr().err.splitlines() == ["inner (25 s)", "outer (50 s)"]


def test_a_long_phase_is_told_after_20_seconds_and_then_every_30(clock, capsys) -> None:
    phases = PhaseReporter()

    def said() -> list[str]:
        for _ in range(100):
            clock[0] += 1
            report()
        return capsys.readouterr().err.splitlines()

    text = "training; the trainer may compile in the first step"
    phases.enter("update")
    phases.enter("hashes")
    assert said() == [f"{text} ({seconds} s)" for seconds in (20, 50, 80)]
    phases.exit("hashes")
    phases.exit("update")
    assert not said()
    phases.first_step = False
    phases.enter("update")
    assert not said()
    phases.enter("save")
    assert said()[0] == "writing the checkpoint (20 s)"
    phases.exit("save")
    phases.exit("update")
    assert not said()
