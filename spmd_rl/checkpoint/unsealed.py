"""`Unsealed`: a checkpoint of which this rank's files are written while training goes on."""

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Generic, TypeVar

from spmd_rl.base.process import in_background

T = TypeVar("T")
POLL_SECONDS = 1.0


class Unsealed(Generic[T]):
    """Begun, and without a manifest until all ranks have met over it: nobody takes it for a checkpoint until then.

    The thread that writes meets no other rank. What it does is no progress of the run while that trains, or a hang
    would stay hidden for as long as there is something to write; it is some where the run waits for it.
    """

    def __init__(self, step: int, temporary: Path, write: Callable[[Callable[[], object]], T]) -> None:
        """`write` is called with a function that it calls whenever it has come on."""
        self.step, self.temporary, self._moved = step, temporary, 0
        self._written = in_background("checkpoint", lambda: write(self._move))

    def _move(self) -> None:
        self._moved += 1

    def result(self, on_progress: Callable[[], object]) -> T:
        """Wait for `write` and return what it gave, or raise what it raised; `on_progress` where it came on."""
        seen = self._moved
        while not wait([self._written], POLL_SECONDS).done:
            if self._moved != seen:
                seen = self._moved
                on_progress()
        return self._written.result()
