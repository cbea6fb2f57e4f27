"""`Unsealed`: a checkpoint whose files are written while training continues."""

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Generic, TypeVar

from spmd_rl.base.process import in_background

T = TypeVar("T")
POLL_SECONDS = 1.0


class Unsealed(Generic[T]):
    """A checkpoint in progress, invalid for readers until all ranks have sealed it with a manifest.

    The writing thread meets no other rank. Its work is no progress of the run during training, or it would hide a hang;
    it is progress while the run waits for it.
    """

    def __init__(self, step: int, temporary: Path, write: Callable[[Callable[[], object]], T]) -> None:
        """Start `write`, which calls its argument after each part of its work."""
        self.step, self.temporary, self._moved = step, temporary, 0
        self._written = in_background("checkpoint", lambda: write(self._move))

    def _move(self) -> None:
        self._moved += 1

    def result(self, on_progress: Callable[[], object]) -> T:
        """Wait for `write` and return its result, or raise its exception; call `on_progress` after each part."""
        seen = self._moved
        while not wait([self._written], POLL_SECONDS).done:
            if self._moved != seen:
                seen = self._moved
                on_progress()
        return self._written.result()
