"""What a rank is doing: phases, named collectives and a progress counter, in memory and in `journal/rank-N.jsonl`.

The file is the input of the hang report and of the timeline in `report.html`; the memory is what the watchdog sends to
the other ranks. When progress has stopped for too long is decided in `watchdog.py`.

    {"t": 1731.25, "event": "enter", "phase": "update", "step": 3}
"""

import errno
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

_encode = msgspec.json.Encoder().encode


class PhaseWatcher(Protocol):
    """Called at each phase of the main thread, while it happens; see `Journal.watch`."""

    def enter(self, phase: str) -> None:
        """A phase begins."""
        ...

    def exit(self, phase: str) -> None:
        """The innermost phase ends."""
        ...


class CollectiveCall(NamedTuple):
    """A collective that a rank is in."""

    name: str
    number: int
    """counted alike by all ranks that meet in it"""
    ranks: tuple[int, ...] = ()
    """those that meet in it; empty: all"""


class Journal:
    """One rank's journal. Phases and collectives belong to the main thread; other threads only read, or `note`."""

    def __init__(self, directory: Path, rank: int, **start: Any) -> None:
        """Open `directory/rank-N.jsonl` for appending and write a `start` line with the fields of `start`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank-{rank}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._phases: list[str] = []
        self._times: dict[str, float] = {}
        self._watchers: list[PhaseWatcher] = []
        self._since = time.perf_counter()
        self._numbers: Counter[str] = Counter()
        self._idle = False
        self._slow_until = self._expected_until = 0.0
        self.step = 0
        self.progress = 0
        """Counts everything that moves: engine steps, micro-batches, bytes, collectives and notes; not phases, which a
        rank that waits may enter again and again."""
        self.inside: CollectiveCall | None = None
        """The collective this rank is in."""
        self.last: CollectiveCall | None = None
        """The last one it entered."""
        self.note("start", rank=rank, **start)

    @property
    def phase_name(self) -> str:
        """The innermost phase, or an empty string."""
        phases = self._phases
        return phases[-1] if phases else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time inside is charged to `name`, except what a phase nested in it takes."""
        self._charge()
        self._phases.append(name)
        self._write("enter", phase=name)
        for watcher in self._watchers:
            watcher.enter(name)
        try:
            yield
        finally:
            for watcher in self._watchers:
                watcher.exit(name)
            self._write("exit", phase=name)
            self._charge()  # what it takes to write this is the phase's too
            left = self._phases.pop()
            assert left == name, f"phase {left} left as {name}: phases of two tasks were interleaved"

    @contextmanager
    def collective(
        self, name: str, kind: str = "wait", subset: str = "", ranks: tuple[int, ...] = (), written: bool = True
    ) -> Iterator[int]:
        """A meeting of all ranks, numbered alike on all of them; one that raises is never marked as done.

        kind: of the time inside; see `kind`. subset, ranks: of a meeting of some ranks only; each subset is numbered
        apart. written: to the file, which is progress; else only a hang report shows it.
        """
        self._numbers[subset] += 1
        name = f"{subset}: {name}" if subset else name
        call, outer = CollectiveCall(name, self._numbers[subset], ranks), self.inside
        self.inside = call
        if written:
            self.last = call
            self.note("collective", phase=self.phase_name, name=name, seq=call.number, kind=kind)
        try:
            yield call.number
        finally:
            self.inside = outer
        if written:
            self.note("collective_done", phase=self.phase_name, name=name, seq=call.number)

    @contextmanager
    def kind(self, kind: str) -> Iterator[None]:
        """Time inside is `compute` (as all other time), `copy` (bytes on the move) or `wait`, until something nested
        names another: it is for the timeline alone, and charged to the phase as ever."""
        self._write("kind", kind=kind)
        try:
            yield
        finally:
            self._write("kind_done")

    def idle(self, idle: bool) -> None:
        """Whether there is nothing to compute for now: that is a `wait`. Written where it changes, ask as you like."""
        if idle != self._idle:
            self._idle = idle
            if idle:
                self._write("kind", kind="wait")
            else:
                self._write("kind_done")

    @contextmanager
    def extend_timeout(self, limit_seconds: float) -> Iterator[None]:
        """The code inside may take so long without any progress: loading a model, starting a server, compiling.

        Meanwhile no rank's watchdog takes the time for a stall.
        """
        outer = self._slow_until
        self._slow_until = max(outer, time.monotonic() + limit_seconds)
        try:
            yield
        finally:
            self._slow_until = outer
            self.progress += 1

    def expect(self, seconds: float) -> None:
        """Something from outside of the ranks, a verdict, may take so long from now: until then idling is no stall."""
        self._expected_until = time.monotonic() + seconds

    def excused(self) -> bool:
        """Whether this rank may be without progress for now; see `extend_timeout` and `expect`."""
        now = time.monotonic()
        return now < self._slow_until or (self._idle and now < self._expected_until)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """On the way into the next collective, called `name`: a wait on the store, for what the others have yet to do.

        Not numbered and not written, since ranks come to it as often as they happen to; only a hang report shows it.
        """
        outer, self.inside = self.inside, CollectiveCall(name, self._numbers[""] + 1)
        try:
            yield
        finally:
            self.inside = outer

    def watch(self, watcher: PhaseWatcher) -> None:
        """Report every phase from now on to `watcher`. Called outside of any phase."""
        assert not self._phases
        self._watchers.append(watcher)

    def set_step(self, step: int) -> None:
        """The training step that later lines belong to."""
        self.step = step
        self.note("step")

    def take_times(self) -> dict[str, float]:
        """Exclusive seconds per phase since the last call, the running phase up to now included; resets them."""
        self._charge()
        times, self._times = self._times, {}
        return times

    def note(self, event: str, **fields: Any) -> None:
        """Write one line. A single write to an unbuffered descriptor: it survives this process, not the machine.

        Where the disk is full the line is lost: whoever writes what counts will fail.
        """
        self.progress += 1
        self._write(event, **fields)

    def _write(self, event: str, **fields: Any) -> None:
        try:
            os.write(self._fd, _encode({"t": time.time(), "event": event, **fields, "step": self.step}) + b"\n")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._phases:
            name = self._phases[-1]
            self._times[name] = self._times.get(name, 0.0) + now - self._since
        self._since = now
