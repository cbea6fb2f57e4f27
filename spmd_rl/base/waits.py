"""Lines on stderr while something takes long.

message = WaitMessage(world.rank)
while not done():
    message("waiting for 14 verdicts (math)")
message.over()
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from spmd_rl.base.errors import tell

FIRST_SECONDS, EVERY_SECONDS = 20.0, 30.0
"""Time before the first line, and between two lines."""
QUIET_SECONDS, LEAST_SECONDS = 2.0, 0.2
"""Ages of the command, and of the phase, before a line of `phase`."""
BEGAN = time.monotonic()


class WaitMessage:
    """A wait's message, printed on rank 0 alone. The clock starts with the first call after `over`."""

    is_open: ClassVar[bool] = False
    """True during such a wait in this process."""

    def __init__(self, rank: int, first: float = FIRST_SECONDS, every: float = EVERY_SECONDS) -> None:
        self._silent, self._first, self._every = rank != 0, first, every
        self._since: float | None = None
        self._next = 0.0

    def __call__(self, text: str) -> None:
        """Print the text and the seconds waited, if due."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._next = now, now + self._first
            # A class attribute: `PhaseReporter` asks whether any wait is open in this process.
            WaitMessage.is_open = True
        if now >= self._next and not self._silent:
            self._next = now + self._every
            tell(f"{text}, for {now - self._since:.0f} s")

    def over(self) -> None:
        """End the wait and reset the clock."""
        self._since = None
        WaitMessage.is_open = False


@contextmanager
def waiting(text: str, rank: int, first: float = FIRST_SECONDS) -> Iterator[None]:
    """Print the text on rank 0, from a thread, while the code inside takes long."""
    message, over = WaitMessage(rank, first), threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            message(text)

    thread = threading.Thread(target=look, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        message.over()


@contextmanager
def phase(text: str, speaks: bool | None = None) -> Iterator[None]:
    """Print the text once the command is two seconds old, if this phase is still active.

    speaks: True if this process prints; default: rank 0.
    """
    wait = max(LEAST_SECONDS, BEGAN + QUIET_SECONDS - time.monotonic())
    timer = threading.Timer(wait, tell, (f"{text} ...",))
    # A daemon, so that a pending line never delays the exit.
    timer.daemon = True
    if os.environ.get("RANK", "0") == "0" if speaks is None else speaks:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
