"""Ranks that train and ranks that generate, killed or stopped in each phase, without an agent."""

import os
import signal
import time
from collections.abc import Callable, Sequence

from tests.e2e.runs import Running, Toy
from tests.patience import patient

STALL = 4
SOON = 2 * STALL + 5
"""Seconds after which a run that has lost a rank is over."""
SETTINGS = (
    "policy.dtype=float32",
    "steps=3",
    "eval.every=1",
    "reward.toy.args.sleep=0.01",
    "reward.toy.timeout=3",
    f"journal.stall_seconds={STALL}",
    f"journal.start_seconds={STALL}",
)
POINTS = {
    "start": "enter start",
    "publish": "progress publish",
    "generate": "progress generate",
    "eval": "progress eval",
    "prepare": "collective train: prepare: samples",
    "update": "collective train: update: backward of micro-batch 1/1",
    "save": "progress save",
}
"""Where a rank is struck in each phase, that both trains and generates."""
MEETING = {"hand-over": "collective hand over: sizes"}
"""The same within a meeting of ranks that train with ranks that generate; a publish is another."""


def strike(
    toy: Toy,
    settings: Sequence[str],
    victim: str,
    phase: str,
    how: signal.Signals,
    point: str,
    watched: int,
    step: int = 2,
) -> Running:
    """A run of four ranks whose victim was struck when rank `watched` was at the point, in a step or at the start."""
    step = step if phase != "start" else 0
    run = toy.linger(point, *settings, step=step, ranks=4, name=f"{victim}-{phase}-{how.name}")
    run.wait_for(point, step=step, rank=watched)
    os.kill(run.pid(victim), how)
    return run


def ended_soon(run: Running, record_property: Callable, within: float = SOON) -> str:
    """Wait for the end of a run that has lost a rank; what it said."""
    began = time.time()
    assert run.wait(60) != 0
    record_property("gone_after", time.time() - began)
    assert time.time() - began < patient(within), run.text()[-3000:]
    assert not run.outlived(2.0), "a process outlived its run"
    return run.text()


def reported(run: Running, victim: str, record_property: Callable) -> str:
    """What the hang report says the others wait for; it must name the victim, and say that it stands still."""
    report = (run.run_dir / "hang.txt").read_text()
    record_property("report", report)
    lines, rank = [line.strip() for line in report.splitlines()], f"rank {victim[-1]}"
    assert f"did not arrive: {rank}" in lines or f"stopped, dead or cut off: {rank}" in lines
    assert "stopped, dead or cut off; no stack" in next(line for line in lines if line.startswith(f"{rank} (pid"))
    return lines[2].removeprefix("collective: '").rpartition("'")[0]
