"""Isolation of environments that draw from the global generators of `random` and numpy.

Several of them in one process would take each other's numbers, and seeds would be meaningless. Each environment gets
private states here, installed while it works; a lock lets one work at a time.
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.RLock()


class OwnRandom:
    """The states of the global generators for one environment."""

    def __init__(self) -> None:
        """Begin with the current global states."""
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def in_place(self, seed: int | None = None) -> Iterator[None]:
        """Install these states, or those of a seed, for the block, and restore the previous ones after it."""
        with _LOCK:
            outer = _states()
            try:
                if seed is not None:
                    random.seed(seed)
                    if numpy := sys.modules.get("numpy"):
                        numpy.random.seed(seed % 2**32)
                elif self._states is not None:
                    _put(self._states)
                yield
            finally:
                self._states = _states()
                _put(outer)


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def _put(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
