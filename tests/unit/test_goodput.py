"""The goodput of a run: useful time over wall time, across starts, kills, torn lines and clocks that jump."""

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.config.schema import RlvrConfig, RunConfig
from spmd_rl.distributed import solo
from spmd_rl.track import goodput
from spmd_rl.track.goodput import Account, Goodput, Line
from spmd_rl.track.run import Run

LAST = 12


def history(rng: random.Random) -> tuple[list[Line], float, float]:
    """Return the lines of a run that is killed at random moments, its useful seconds and its wall seconds.

    Time is played second by second, each a second of a step or of nothing; at the end it is counted for which steps
    that were not done again each one had been.
    """
    seconds: list[int | None] = []  # the step worked on in each second that is known to have ended in a line
    pending: list[int | None] = []  # since the last line
    lines: list[Line] = []

    def line(event: str, step: int = -1) -> None:
        seconds.extend(pending if event == "step" else [None] * len(pending))
        pending.clear()
        lines.append(Line(1000.0 + len(seconds), event, step))

    saved = 0
    while saved < LAST:
        line("start")
        pending += [None] * rng.randrange(4)
        if rng.random() < 0.2:
            continue  # killed while it started
        line("resume", saved)
        seconds = [step if step is not None and step <= saved else None for step in seconds]
        for step in range(saved + 1, LAST + 1):
            pending += [step] * rng.randrange(1, 5)
            if rng.random() < 0.15:
                break  # killed in the step
            if saves := rng.random() < 0.6:
                line("step", step)
                pending += [step] * rng.randrange(3)
                if rng.random() < 0.1:
                    break  # killed while it saved: the checkpoint is not there
                saved = step
                if rng.random() < 0.1:
                    break  # killed between the save and the step's end
            line("step", step)
            if saves and rng.random() < 0.1:
                break
        pending += [None] * rng.randrange(6)  # waiting for the scheduler
    line("start")
    line("resume", saved)
    return lines, sum(step is not None and step <= saved for step in seconds), float(len(seconds))


@given(st.integers(0, 10**9))
def test_random_histories_against_a_count_of_seconds(seed: int) -> None:
    lines, useful, wall = history(random.Random(seed))
    account = Account()
    for line in lines:
        account.add(line)
        assert 0 <= account.goodput <= 1
    assert (account.useful, account.wall) == (useful, wall)
    assert account.starts == sum(line.event == "start" for line in lines)


@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.sampled_from(["start", "resume", "step", "end"]), st.integers(0, 5)))
)
def test_a_clock_that_jumps_gives_a_share_all_the_same(jumps) -> None:
    account = Account()
    for t, event, step in jumps:
        account.add(Line(t, event, step))
        assert 0 <= account.goodput <= 1 and account.useful <= account.wall + 1e-6


def test_each_step_counts_once_and_what_is_lost_does_not() -> None:
    account = Account()
    for line in [
        Line(0, "start"),
        Line(10, "resume", 0),
        Line(30, "step", 1),
        Line(50, "step", 2),  # never saved
        Line(100, "start"),  # killed in step 3, and waited for the scheduler
        Line(110, "resume", 1),
        Line(135, "step", 2),  # again
    ]:
        account.add(line)
    assert (account.useful, account.wall, account.starts) == (20 + 25, 135, 2)


def test_time_between_an_end_and_a_continuation_counts_as_waiting() -> None:
    account = Account()
    for line in [Line(0, "start"), Line(1, "resume", 0), Line(9, "step", 1), Line(10, "end"), Line(9_999, "start")]:
        account.add(line)
    assert (account.useful, account.wall) == (8, 9_999)


def test_a_torn_last_line_costs_its_own_stretch_alone(tmp_path: Path) -> None:
    now = [10.0]
    first = Goodput(tmp_path, began=4.0, clock=lambda: now[0])
    first.resume(0)
    for step, t in ((1, 20.0), (2, 30.0), (3, 40.0)):
        now[0] = t
        first.step(step)
    path = tmp_path / goodput.FILE
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(whole) + 1):  # wherever the last line is torn
        path.write_bytes(whole[:cut])
        now[0] = 50.0
        again = Goodput(tmp_path, began=0.0, clock=lambda: now[0])
        again.resume(3)
        now[0] = 60.0
        again.step(4)
        assert again.account == goodput.read(tmp_path)
        is_whole = cut >= len(whole) - 1
        assert again.account.useful == (40.0 if is_whole else 30.0)
        assert again.account.wall == 60.0 - 4.0 and again.account.starts == 2
    path.write_bytes(whole + b"\0" * 64)  # as a file system may leave it
    assert Goodput(tmp_path, 0.0).account.starts == 2


def test_a_run_says_its_goodput_in_each_line_over_all_its_starts(tmp_path: Path, capsys) -> None:
    cfg = RlvrConfig(steps=3, run=RunConfig(name="toy", dir=str(tmp_path)))
    for steps in ((1, 2), (2, 3)):  # the second start does step 2 again
        with solo(tmp_path) as world, Run.open(cfg, world) as track:
            if steps[0] == 2:
                track.load_state({"run": "toy", "id": "id", "step": 1, "line": {}})
            for step in steps:
                with track.step(step):
                    if step == 3:
                        track.state()
    lines = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 < line["system/goodput"] <= 1 for line in lines)
    account = goodput.read(tmp_path)
    assert account.starts == 2 and lines[-1]["system/goodput"] == pytest.approx(account.goodput, abs=0.5)
    assert "2 starts" in capsys.readouterr().err and "2 starts" in (tmp_path / "report.html").read_text()
