"""A rank's phases, collectives and progress counter, in memory and in `journal/rank-N.jsonl`.

The file feeds the timeline in `report.html` and `view`; the watchdog sends the memory to other ranks, for the hang
report.

    {"t": 1731.25, "event": "enter", "phase": "update", "step": 3}

With `journal.hashes=true`, `journal/hashes-N.jsonl` has hashes of what phases computed, for `bisect`:

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
    """Callbacks at the main thread's phases; see `Journal.watch`."""

    def enter(self, phase: str) -> None:
        """Handle the beginning of a phase."""
        ...

    def exit(self, phase: str) -> None:
        """Handle the innermost phase's end."""
        ...


class CollectiveCall(NamedTuple):
    """A collective that a rank has entered."""

    name: str
    number: int
    """sequence number, equal on all its ranks"""
    ranks: tuple[int, ...] = ()


class Journal:
    """One rank's journal. Phases and collectives are the main thread's; other threads only read, or `note`."""

    def __init__(self, directory: Path, rank: int, **start: Any) -> None:
        """Open `directory/rank-N.jsonl` for appending; write a `start` line with these fields."""
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank-{rank}.jsonl"
        self._fd = _open(self.path)
        self._hashes = directory / f"hashes-{rank}.jsonl"
        self.hashes = False
        """True if `record` writes hashes"""
        self._phases: list[str] = []
        self._times: dict[str, float] = {}
        self._watchers: list[PhaseWatcher] = []
        self._since = time.perf_counter()
        self._numbers: Counter[str] = Counter()
        self._idle = False
        self._slow_until = self._expected_until = 0.0
        self.step = 0
        self.progress = 0
        """Engine steps, micro-batches, bytes, collectives and notes; not phases, which a waiting rank may enter
        repeatedly"""
        self.inside: CollectiveCall | None = None
        """Collective that this rank is in"""
        self.last: CollectiveCall | None = None
        """Collective that this rank entered last"""
        self.note("start", rank=rank, **start)

    @property
    def phase_name(self) -> str:
        """Innermost phase, or an empty string."""
        phases = self._phases
        return phases[-1] if phases else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`, except for nested phases."""
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
        """Journal a collective of all ranks, numbered alike; one that raises is never marked as done.

        kind: of the time inside. subset, ranks: for a collective of some ranks, numbered by subset. written: to the
        file, which counts as progress; else only for a hang report.
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
        """Mark the time inside as `compute` (default), `copy` (bytes in transfer) or `wait`, except in nested kinds.

        For the timeline only; the phase is charged in any case.
        """
        self._write("kind", kind=kind)
        try:
            yield
        finally:
            self._write("kind_done")

    def idle(self, idle: bool) -> None:
        """Mark this rank as idle (a `wait`) or busy; only changes are written."""
        if idle != self._idle:
            self._idle = idle
            if idle:
                self._write("kind", kind="wait")
            else:
                self._write("kind_done")

    @contextmanager
    def extend_timeout(self, limit_seconds: float) -> Iterator[None]:
        """Allow the code inside `limit_seconds` without progress: loading, starting a server, compiling."""
        outer = self._slow_until
        self._slow_until = max(outer, time.monotonic() + limit_seconds)
        try:
            yield
        finally:
            self._slow_until = outer
            self.progress += 1

    def expect(self, seconds: float) -> None:
        """Allow idling for `seconds` while a result from elsewhere (a verdict) is pending."""
        self._expected_until = time.monotonic() + seconds

    def excused(self) -> bool:
        """Return True if this rank may be without progress; see `extend_timeout` and `expect`."""
        now = time.monotonic()
        return now < self._slow_until or (self._idle and now < self._expected_until)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Journal a wait on the store before the next collective, for a hang report alone."""
        # Neither numbered nor written, since its count differs by rank.
        outer, self.inside = self.inside, CollectiveCall(name, self._numbers[""] + 1)
        try:
            yield
        finally:
            self.inside = outer

    def watch(self, watcher: PhaseWatcher) -> None:
        """Report later phases to `watcher`. Called outside any phase."""
        assert not self._phases
        self._watchers.append(watcher)

    def set_step(self, step: int) -> None:
        """Set the training step of later lines."""
        self.step = step
        self.note("step")

    def take_times(self) -> dict[str, float]:
        """Return exclusive seconds per phase since the last call, the running one included; reset them."""
        self._charge()
        times, self._times = self._times, {}
        return times

    def note(self, event: str, **fields: Any) -> None:
        """Write a line by one unbuffered write, which survives this process but not the machine."""
        self.progress += 1
        self._write(event, **fields)

    def record(self, step: int, phase: str, of: str, find: Callable[[], Mapping[str, str]]) -> None:
        """Write the hashes that `find` returns, if `hashes` is set; else do not call it.

        of: the hashed object, such as a role and its update.
        """
        if self.hashes:
            with self.phase("hashes"):
                fd = _open(self._hashes)
                _append(fd, {"step": step, "phase": phase, "of": of, "found": find()})
                os.close(fd)

    def _write(self, event: str, **fields: Any) -> None:
        _append(self._fd, {"t": time.time(), "event": event, **fields, "step": self.step})

    def close(self) -> None:
        """Close this journal's open file."""
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
