"""A line on stderr during a long wait: early enough to calm a user, rare enough to be read.

message = WaitMessage(world.rank)
while not done():
    message("waiting for 14 verdicts (math)")  # in every round
message.over()
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from spmd_rl.base.errors import tell

FIRST_SECONDS, EVERY_SECONDS = 20.0, 30.0
"""Seconds before the first line, and between two lines."""


class WaitMessage:
    """A wait's message, printed on rank 0 alone. The clock starts with the first call after `over`."""

    is_open: ClassVar[bool] = False
    """True during such a wait in this process, so that other code does not print the same."""

    def __init__(self, rank: int, first: float = FIRST_SECONDS, every: float = EVERY_SECONDS) -> None:
        self._silent, self._first, self._every = rank != 0, first, every
        self._since: float | None = None
        self._next = 0.0

    def __call__(self, text: str) -> None:
        """Print the text and the seconds waited, if a line is due."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._next = now, now + self._first
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
