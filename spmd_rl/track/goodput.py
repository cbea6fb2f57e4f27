"""Goodput, or ETTR (effective training time ratio): the share of a run's wall time spent on steps that count.

`run.dir/goodput.jsonl` has a line at the end of each stretch of time:

    {"t": 1731.2, "event": "start"}             the job has started
    {"t": 1740.8, "event": "resume", "step": 0} it continues after step 0: work on later steps is repeated
    {"t": 1752.4, "event": "step", "step": 1}   it worked on step 1: written at its end, and when it is saved
    {"t": 1790.0, "event": "end"}               the run is complete

A stretch is useful if it ends in a `step` that counts. Not useful are starting, restoring, the part of a step before
the job died, repeated steps, and waiting for a restart. Evaluations and checkpoints belong to their step.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

FILE = "goodput.jsonl"


class Line(msgspec.Struct, omit_defaults=True):
    """A line of the file; see the module's docstring."""

    t: float
    event: Literal["start", "resume", "step", "end"]
    step: int = -1


@dataclass(slots=True)
class Account:
    """The time of a run, useful and total."""

    wall: float = 0.0
    """Time from the first start to the last line."""
    starts: int = 0
    _steps: dict[int, float] = field(default_factory=dict)
    """Seconds of each step that counts."""
    _last: Line | None = None

    @property
    def useful(self) -> float:
        """Seconds of steps that count."""
        return sum(self._steps.values())

    @property
    def goodput(self) -> float:
        """Useful time over wall time, from 0 to 1."""
        return min(1.0, self.useful / self.wall) if self.wall > 0 else 0.0

    def add(self, line: Line) -> None:
        """Count the time since the previous line."""
        before, self._last = self._last, line
        # A clock that was set back must not make time negative.
        seconds = max(0.0, line.t - before.t) if before is not None else 0.0
        self.wall += seconds
        if line.event == "start":
            self.starts += 1
        elif line.event == "resume":
            # Steps after the checkpoint will be repeated, so their time was lost.
            self._steps = {step: spent for step, spent in self._steps.items() if step <= line.step}
        elif line.event == "step":
            self._steps[line.step] = self._steps.get(line.step, 0.0) + seconds


def read(directory: Path) -> Account:
    """Return a run directory's account; empty without a file. Torn lines are skipped."""
    account, path = Account(), directory / FILE
    decode = msgspec.json.Decoder(Line).decode
    for text in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            line = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        account.add(line)
    return account


class Goodput:
    """The account of a run, on the one rank that writes it."""

    def __init__(self, directory: Path, began: float, clock: Callable[[], float] = time.time) -> None:
        """Record the start of the job, at `began` in a new run. OSError if it cannot be written."""
        self.account = read(directory)
        self._path, self._clock = directory / FILE, clock
        # A torn last line of a killed run must not swallow the next line.
        self._separate = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        self._note("start", t=clock() if self.account.starts else min(began, clock()))

    def resume(self, last: int) -> None:
        """Record that the run continues after step `last`."""
        self._note("resume", last)

    def step(self, step: int) -> float:
        """Count the time since the last line as work on `step`; return the goodput so far."""
        self._note("step", step)
        return self.account.goodput

    def end(self) -> None:
        """Record the end of the run."""
        self._note("end")

    def _note(self, event: Literal["start", "resume", "step", "end"], step: int = -1, t: float | None = None) -> None:
        line = Line(self._clock() if t is None else t, event, step)
        self.account.add(line)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, b"\n" * self._separate + msgspec.json.encode(line) + b"\n")
        finally:
            os.close(fd)
        self._separate = False
