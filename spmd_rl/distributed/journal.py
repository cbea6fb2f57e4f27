"""A rank's phases, named collectives and progress counter, in memory and in `journal/rank-N.jsonl`.

The file feeds the hang report, the timeline in `report.html` and `view`; the watchdog sends the memory to the other
ranks. `watchdog.py` decides when a run has stalled.

    {"t": 1731.25, "event": "enter", "phase": "update", "step": 3}

With `journal.hashes=true`, `journal/hashes-N.jsonl` has what the phases of a rank computed, for `bisect`:

    {"step": 3, "phase": "update", "of": "policy 2", "found": {"loss": "0.25", "norm.weight": "9f3c0a..."}}
"""

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

_encode = msgspec.json.Encoder().encode


class PhaseWatcher(Protocol):
    """Callbacks at each phase of the main thread; see `Journal.watch`."""

    def enter(self, phase: str) -> None:
        """Handle the beginning of a phase."""
        ...

    def exit(self, phase: str) -> None:
        """Handle the end of the innermost phase."""
        ...


class CollectiveCall(NamedTuple):
    """A collective that a rank has entered."""

    name: str
    number: int
    """sequence number, equal on all ranks of the collective"""
    ranks: tuple[int, ...] = ()
    """ranks of the collective; empty: all"""


class Journal:
    """One rank's journal. Phases and collectives belong to the main thread; other threads only read, or `note`."""

    def __init__(self, directory: Path, rank: int, **start: Any) -> None:
        """Open `directory/rank-N.jsonl` for appending and write a `start` line with the fields of `start`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank-{rank}.jsonl"
        self._fd = _open(self.path)
        self._hashes = directory / f"hashes-{rank}.jsonl"
        self.hashes = False
        """True if `record` writes."""
        self._phases: list[str] = []
        self._times: dict[str, float] = {}
        self._watchers: list[PhaseWatcher] = []
        self._since = time.perf_counter()
        self._numbers: Counter[str] = Counter()
        self._idle = False
        self._slow_until = self._expected_until = 0.0
        self.step = 0
        self.progress = 0
        """Progress counter: engine steps, micro-batches, bytes, collectives and notes. Phases are left out, since a
        waiting rank may enter them repeatedly.
        """
        self.inside: CollectiveCall | None = None
        """Collective that this rank is in."""
        self.last: CollectiveCall | None = None
        """Collective that this rank entered last."""
        self.note("start", rank=rank, **start)

    @property
    def phase_name(self) -> str:
        """Innermost phase, or an empty string."""
        phases = self._phases
        return phases[-1] if phases else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`, except that of nested phases."""
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
            # Charged after the write, so that the phase pays for its own lines.
            self._charge()
            left = self._phases.pop()
            assert left == name, f"phase {left} left as {name}: phases of two tasks were interleaved"

    @contextmanager
    def collective(
        self, name: str, kind: str = "wait", subset: str = "", ranks: tuple[int, ...] = (), written: bool = True
    ) -> Iterator[int]:
        """Journal a collective of all ranks, numbered alike on all of them; one that raises is never marked as done.

        kind: of the time inside; see `kind`. subset, ranks: for a collective of some ranks; each subset has its own
        numbers. written: to the file, which counts as progress; otherwise only a hang report shows it.
        """
        self._numbers[subset] += 1
        name = f"{subset}: {name}" if subset else name
        call, outer = CollectiveCall(name, self._numbers[subset], ranks), self.inside
        self.inside = call
        if written:
            self.last = call
            # Before the call: after a hang the file must show the collective that was entered.
            self.note("collective", phase=self.phase_name, name=name, seq=call.number, kind=kind)
        try:
            yield call.number
        finally:
            self.inside = outer
        if written:
            self.note("collective_done", phase=self.phase_name, name=name, seq=call.number)

    @contextmanager
    def kind(self, kind: str) -> Iterator[None]:
        """Mark the time inside as `compute` (the default), `copy` (bytes in transfer) or `wait`, except in nested
        kinds.

        Only the timeline uses it; the phase is charged in any case.
        """
        self._write("kind", kind=kind)
        try:
            yield
        finally:
            self._write("kind_done")

    def idle(self, idle: bool) -> None:
        """Mark this rank as idle, which is a `wait`, or busy. Only changes are written, so frequent calls are fine."""
        if idle != self._idle:
            self._idle = idle
            if idle:
                self._write("kind", kind="wait")
            else:
                self._write("kind_done")

    @contextmanager
    def extend_timeout(self, limit_seconds: float) -> Iterator[None]:
        """Allow the code inside `limit_seconds` without progress: loading a model, starting a server, compiling.

        No rank's watchdog counts this time as a stall.
        """
        outer = self._slow_until
        self._slow_until = max(outer, time.monotonic() + limit_seconds)
        try:
            yield
        finally:
            self._slow_until = outer
            self.progress += 1

    def expect(self, seconds: float) -> None:
        """Allow idling for `seconds` from now, while a result from outside of the ranks (a verdict) is pending."""
        self._expected_until = time.monotonic() + seconds

    def excused(self) -> bool:
        """Return True if this rank may be without progress now; see `extend_timeout` and `expect`."""
        now = time.monotonic()
        return now < self._slow_until or (self._idle and now < self._expected_until)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Journal a wait on the store before the next collective, called `name`.

        It is neither numbered nor written, since its count differs by rank; only a hang report shows it.
        """
        outer, self.inside = self.inside, CollectiveCall(name, self._numbers[""] + 1)
        try:
            yield
        finally:
            self.inside = outer

    def watch(self, watcher: PhaseWatcher) -> None:
        """Report every later phase to `watcher`. Called outside of any phase."""
        assert not self._phases
        self._watchers.append(watcher)

    def set_step(self, step: int) -> None:
        """Set the training step of later lines."""
        self.step = step
        self.note("step")

    def take_times(self) -> dict[str, float]:
        """Return exclusive seconds per phase since the last call, the running phase included, and reset them."""
        self._charge()
        times, self._times = self._times, {}
        return times

    def note(self, event: str, **fields: Any) -> None:
        """Write one line by a single unbuffered write, which survives this process but not the machine.

        On a full disk the line is lost: other writers will report it.
        """
        self.progress += 1
        self._write(event, **fields)

    def record(self, step: int, phase: str, of: str, find: Callable[[], Mapping[str, str]]) -> None:
        """Write the hashes that `find` returns, by name, if `hashes` is set; otherwise do not call it.

        of: what they are hashes of, such as a role and its update.
        """
        if self.hashes:
            with self.phase("hashes"):
                fd = _open(self._hashes)
                _append(fd, {"step": step, "phase": phase, "of": of, "found": find()})
                os.close(fd)

    def _write(self, event: str, **fields: Any) -> None:
        _append(self._fd, {"t": time.time(), "event": event, **fields, "step": self.step})

    def close(self) -> None:
        """Close the file of this journal."""
        os.close(self._fd)

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._phases:
            name = self._phases[-1]
            self._times[name] = self._times.get(name, 0.0) + now - self._since
        self._since = now


def _open(path: Path) -> int:
    # O_APPEND and one write per line: lines of several starts and threads do not overwrite each other.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _append(fd: int, line: Mapping[str, Any]) -> None:
    try:
        os.write(fd, _encode(line) + b"\n")
    except OSError as error:
        # A full disk must not end a run through its journal.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
