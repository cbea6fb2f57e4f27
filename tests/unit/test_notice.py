"""A long wait is told on rank 0: not at once, and not too often."""

import time

import pytest

from spmd_rl.base import waits
from spmd_rl.track.phase_reporter import PhaseReporter


def test_a_wait_in_a_library_is_told_from_a_thread(capsys) -> None:
    for rank in (0, 1):
        with waits.waiting("waiting for 2 ranks", rank, first=0.0):
            time.sleep(0.5)
    assert capsys.readouterr().err == "waiting for 2 ranks, for 0 s\n"


@pytest.mark.parametrize(("rank", "lines"), [(0, 3), (1, 0)])
def test_a_long_wait_is_told_seldom_and_by_rank_0(monkeypatch, capsys, rank: int, lines: int) -> None:
    clock = [100.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: clock[0])
    tell = waits.WaitMessage(rank, first=20.0, every=30.0)
    for _ in range(90):  # 90 s: at 20, 50 and 80
        tell("waiting for 14 verdicts (math)")
        clock[0] += 1.0
    assert waits.WaitMessage.is_open and PhaseReporter().due() is None
    tell.over()
    assert not waits.WaitMessage.is_open
    tell("waiting for 3 verdicts (code)")  # another wait begins
    printed = capsys.readouterr().err.splitlines()
    tell.over()
    assert len(printed) == lines
    assert not printed or printed[0] == "waiting for 14 verdicts (math), for 20 s"
