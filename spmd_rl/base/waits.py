"""Lines on stderr while something takes long.

    with waiting("waiting for 2 ranks", world.rank == 0):  # "waiting for 2 ranks (20 s)", every 30 s
        connect()

    with phase("reading the prompts"):  # of a command that only prints: as soon as the command is two seconds old
        prompts = Prompts.load(cfg.data)

A thread prints them. Of several waits in a process, one inside the other, it prints the innermost alone.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.base.errors import tell

FIRST_SECONDS, EVERY_SECONDS = 20.0, 30.0
"""Time before the first line, and between two lines."""
QUIET_SECONDS, LEAST_SECONDS = 2.0, 0.2
"""Ages of the command, and of the phase, before a line of `phase`."""
BEGAN = time.monotonic()


class Wait:
    """A wait that may become long. Its text may change meanwhile."""

    def __init__(self, speaks: bool = True, first: float = FIRST_SECONDS) -> None:
        """Print nothing unless `speaks`; first: seconds before the first line."""
        self._speaks, self._first = speaks, first
        self._text, self._began, self._next = "", 0.0, 0.0

    def __call__(self, text: str) -> None:
        """Begin the wait, unless it is open, with this text from now on."""
        self._text = text
        if self._speaks and self not in _open:
            self._began = time.monotonic()
            self._next = self._began + self._first
            _open.append(self)
            # A forked process has none of its parent's threads.
            if not any(thread.name == "waits" for thread in threading.enumerate()):
                # A daemon, so that it never delays the exit.
                threading.Thread(target=_report_always, name="waits", daemon=True).start()

    def over(self) -> None:
        """End the wait, if it is open."""
        if self in _open:
            _open.remove(self)

    def report(self) -> None:
        """Print the text and the seconds waited, if a line is due."""
        if (now := time.monotonic()) >= self._next:
            self._next, seconds = now + EVERY_SECONDS, now - self._began
            tell(f"{self._text} ({seconds:.0f} s)" if seconds >= 1 else f"{self._text} ...")


_open: list[Wait] = []
os.register_at_fork(after_in_child=_open.clear)


def report() -> None:
    """Print the line of the innermost wait, if one is due."""
    for wait in _open[-1:]:
        wait.report()


def _report_always() -> None:
    while True:
        time.sleep(LEAST_SECONDS)
        report()


@contextmanager
def waiting(text: str, speaks: bool = True, first: float = FIRST_SECONDS) -> Iterator[None]:
    """Print the text while the code inside takes long. speaks, first: as for `Wait`."""
    wait = Wait(speaks, first)
    wait(text)
    try:
        yield
    finally:
        wait.over()


@contextmanager
def phase(text: str, speaks: bool | None = None) -> Iterator[None]:
    """Print the text once the command is two seconds old, if this phase is still active.

    speaks: True if this process prints; default: rank 0.
    """
    speaks = os.environ.get("RANK", "0") == "0" if speaks is None else speaks
    with waiting(text, speaks, max(LEAST_SECONDS, BEGAN + QUIET_SECONDS - time.monotonic())):
        yield
