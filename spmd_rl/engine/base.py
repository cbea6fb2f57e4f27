"""`Engine`: the interface of inference engines for rollout and weight publishing, without datasets or rewards.

Every engine passes `tests/unit/test_engine_parity.py` against plain Hugging Face + torch in fp32.
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
    """Requests decoded at the same time."""
    kv_tokens: int
    """Tokens of KV cache over all running requests."""
    max_tokens: int
    """Tokens of one request, prompt and answer together."""


@dataclass(slots=True)
class EngineCounts:
    """Counts of prompt tokens, of cached ones among them, and of drafts."""

    asked: int = 0
    """Prompt tokens of all requests started; the caller may reset all four counts to 0."""
    cached: int = 0
    """Prompt tokens found in the cache, from an earlier turn or another answer to the same prompt."""
    verified: int = 0
    """Number of drafts that were verified."""
    accepted: int = 0
    """Number of drafted tokens that were accepted."""

    def count(self, asked: int, cached: int) -> None:
        """Add the prompt of one request."""
        self.asked += asked
        self.cached += cached


class Sleeper(Protocol):
    """An engine's memory on a shared device."""

    def awake(self) -> AbstractContextManager[None]:
        """Keep weights and KV cache on the device inside; outside they may be offloaded. No-op on a CPU."""
        ...

    def sleep(self) -> None:
        """Free the device's memory until the next `load`. No-op on a CPU."""


class Engine(Sleeper, Protocol):
    """The engine of one replica, in the rank's process, request by request.

    In a replica of several ranks each has an `Engine`, and all make the same calls in the same order, except inside
    `driven()`, where only the first rank calls. The default `driven` and `joined` are for a replica of one rank.
    """

    capacity: Capacity
    """Limits of the engine, fixed at construction."""
    processor: Any = None
    """`model.pictures.Processor` of a model that takes pictures"""
    leads: bool = True
    """True if this rank is the first of its replica."""
    token_counts: EngineCounts
    """Counts over all requests since construction, or since the caller reset them."""

    def driven(self, join: Callable[[bytes], None] | None = None) -> AbstractContextManager[None]:
        """[replica] Make all ranks follow the first rank's requests and steps inside.

        On the first rank the body runs at once and drives the engine. On the others, entering the block replays the
        first rank's calls until it leaves; then their body runs. No request may be in progress at the end. join: called
        on the others with the message of `joined`.
        """
        return nullcontext()

    def joined(self, message: bytes) -> AbstractContextManager[None]:
        """[first rank, in `driven`] Context for a call that every rank makes itself, such as a load in the middle of a
        generation: the other ranks run `join(message)` meanwhile. Requests in progress must not be advanced."""
        return nullcontext()

    def add(self, request: Request) -> None:
        """Queue a request. AssertionError before the first `load`, and for a duplicate id.

        ValueError for a request longer than `capacity.max_tokens`.
        """
        ...

    def abort(self, ids: Iterable[str]) -> None:
        """Stop these requests; the next `step` returns each with `finish_reason='abort'` and its tokens so far."""
        ...

    def step(self) -> list[Completion]:
        """Admit waiting requests that fit, in the order of `Request.queue_key`, then of `add`; compute one token for
        each running request, and return the finished ones. No-op when idle.

        A replica of several ranks may compute a few tokens each. Prompts of new requests may take a separate step.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of requests waiting and running."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load all weights (Hugging Face names, each once); later tokens carry `version`.

        Cached keys and values are dropped, except those of requests in progress, which continue with them. An engine
        that cannot do that asserts `num_unfinished == 0`. A tensor is valid until the next one. Read all of them, since
        other ranks gather with this one; then raise RunFailed for a missing, unknown, repeated or misshapen one.
        """
        ...

    def loaded_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the engine's tensor for every name given to `load`; None if it is packed, rounded or split over ranks,
        so that it cannot be compared."""
        ...

    def close(self) -> None:
        """Free everything the engine holds; idempotent."""
        ...
