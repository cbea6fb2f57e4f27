"""`Engine`: the interface of inference engines, for rollout and weight publishing.

`tests/unit/test_engine_parity.py` compares each with plain Hugging Face + torch in float32.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from spmd_rl.types import Completion, Request


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of an engine's requests and cache."""

    max_running: int
    kv_tokens: int
    """Tokens of KV cache over all running requests"""
    max_tokens: int
    """Tokens of one request, prompt and answer together"""


@dataclass(slots=True)
class EngineCounts:
    """Counts of prompt tokens, cached ones, and drafts."""

    asked: int = 0
    """Prompt tokens of all started requests; callers may reset the four counts"""
    cached: int = 0
    """Prompt tokens found in the cache"""
    verified: int = 0
    """Drafts that were verified so far"""
    accepted: int = 0
    """Drafted tokens accepted so far"""

    def count(self, asked: int, cached: int) -> None:
        """Add one request's prompt tokens."""
        self.asked += asked
        self.cached += cached


class Sleeper(Protocol):
    """An engine's memory on a shared device."""

    def awake(self) -> AbstractContextManager[None]:
        """Give the engine its device memory inside; outside it may be offloaded. Nests."""
        ...

    def sleep(self) -> None:
        """Free what `awake` leaves on the device."""
        ...


class Engine(Sleeper, Protocol):
    """One replica's engine in a rank's process, request by request.

    All ranks of a replica make the same calls in the same order, except inside `driven()`, where only the first calls.
    The default `driven` and `joined` are for one rank.
    """

    capacity: Capacity
    processor: Any = None
    """`model.pictures.Processor`, if the model takes pictures"""
    leads: bool = True
    """True on the first rank of a replica"""
    token_counts: EngineCounts

    def driven(self, join: Callable[[bytes], None] | None = None) -> AbstractContextManager[None]:
        """[replica] Make all ranks follow the first one's requests and steps inside.

        The first rank's body runs at once. On others, entering the block replays its calls until it leaves; then their
        body runs. No request may be in progress at the end. join: called on the others with the message of `joined`.
        """
        return nullcontext()

    def joined(self, message: bytes) -> AbstractContextManager[None]:
        """[first rank, in `driven`] Context for a call that every rank makes, such as a load during generation: the
        others run `join(message)` meanwhile. Requests must not be advanced."""
        return nullcontext()

    def add(self, request: Request) -> None:
        """Queue a request. ValueError if longer than `capacity.max_tokens`; AssertionError before the first `load`
        and for a duplicate id."""
        ...

    def abort(self, ids: Iterable[str]) -> None:
        """Stop requests; the next `step` returns each with `finish_reason='abort'` and its tokens so far. Finished
        ids are ignored."""
        ...

    def step(self) -> list[Completion]:
        """Admit waiting requests that fit, by `Request.queue_key`, then order of `add`; compute one token for each
        running request, and return finished ones. No-op when idle.

        A replica of several ranks may compute a few tokens each. New prompts may take a separate step.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose completion was not returned."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load all weights (Hugging Face names, each once); later tokens carry `version`.

        Cached keys and values are dropped, except those of requests in progress, which continue with them; an engine
        that cannot do so asserts `num_unfinished == 0`. Tensors are valid until the next. All are read, since other
        ranks gather too; then RunFailed for missing, unknown, repeated or misshapen ones.
        """
        ...

    def loaded_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the engine's tensor for each published name; None if packed, rounded or split over ranks, hence not
        comparable."""
        ...

    def close(self) -> None:
        """Free everything the engine holds; idempotent."""
        ...
