"""A line on stderr while a wait goes on: early enough to calm a user, seldom enough to be read.

message = WaitMessage(world.rank)
while not done():
    message("waiting for 14 verdicts (math)")  # at any rate
message.over()
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from spmd_rl.base.errors import tell

FIRST_SECONDS, EVERY_SECONDS = 20.0, 30.0
"""The wait before the first line, and the pause between two lines."""


class WaitMessage:
    """Prints on rank 0 alone. The clock starts with the first call after `over`."""

    is_open: ClassVar[bool] = False
    """Whether such a wait goes on in this process, so that nobody else need print what the run waits for."""

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
        """End the wait."""
        self._since = None
        WaitMessage.is_open = False


@contextmanager
def waiting(text: str, rank: int, first: float = FIRST_SECONDS) -> Iterator[None]:
    """Print the text on rank 0 while what is inside takes long, from a thread."""
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
