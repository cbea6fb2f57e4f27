"""`Engine`: what the scheduler needs of an inference engine, request by request. It knows no prompt and no reward.

Every engine passes `tests/unit/test_engine_parity.py` against plain Hugging Face + torch in fp32.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spmd_rl.types import Completion, Request


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold."""

    max_running: int
    """requests decoded side by side"""
    kv_tokens: int
    """tokens of KV cache over all running requests"""
    max_tokens: int
    """prompt and answer of one request"""


class Engine(Protocol):
    """One replica's engine, in the rank's own process. Nothing here meets other ranks at `engine.tp=1`.

    Above, the ranks of a replica make the same calls in the same order, and meet in `step`.
    """

    @property
    def capacity(self) -> Capacity:
        """Fixed at construction."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request. Refused (assertion) until `load` has been called in this process, and for a duplicate id.

        A request longer than `capacity.max_tokens` is a ValueError.
        """
        ...

    def abort(self, ids: Iterable[str]) -> None:
        """Stop these requests; each comes back from the next `step` with `finish_reason='abort'` and what it has."""
        ...

    def step(self) -> list[Completion]:
        """Admit what fits, compute one token for each running request, return those that ended. No-op when idle."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests waiting and running."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights (Hugging Face names, each once) and stamp later tokens with `version`.

        Only between requests: asserts `num_unfinished == 0`. Drops every cached key and value.
        """
        ...

    def loaded_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """The weights as the engine holds them, under the names given to `load`; None for one not plain and whole."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Weights and KV cache are on the device inside, and may be off it outside. On CPU it is free."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...
