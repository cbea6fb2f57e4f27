"""`Engine`: what rollout and weight publishing need of an inference engine. It knows no dataset and no reward.

Every engine passes `tests/unit/test_engine_parity.py` against plain Hugging Face + torch in fp32.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spmd_rl.types import Completion, Request


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold."""

    max_running: int
    """Requests decoded side by side."""
    kv_tokens: int
    """Tokens of KV cache over all running requests."""
    max_tokens: int
    """Tokens of one request, prompt and answer together."""


@dataclass(slots=True)
class EngineCounts:
    """How many prompt tokens an engine was given, what of them it did not have to compute, and how drafts fared."""

    asked: int = 0
    """Tokens of the prompts of all requests begun; the caller may set both to 0."""
    cached: int = 0
    """Prompt tokens whose keys and values were there: of an earlier turn, or of another answer to the same prompt."""
    verified: int = 0
    """How often a draft was verified."""
    accepted: int = 0
    """Drafted tokens that were accepted."""

    def count(self, asked: int, cached: int) -> None:
        """Add the prompt of one request."""
        self.asked += asked
        self.cached += cached


class Engine(Protocol):
    """The engine of one replica, in the rank's own process, request by request.

    Where a replica has several ranks, each has an `Engine`, and all make the same calls in the same order, except
    inside `driven()`, where its first rank alone asks. An engine that inherits from this is of a replica of one rank.
    """

    capacity: Capacity
    """Fixed at construction."""
    leads: bool = True
    """Whether this rank is the first of its replica."""
    token_counts: EngineCounts
    """Counts over all requests since the construction, or since the caller set them to 0."""

    def driven(self, join: Callable[[bytes], None] | None = None) -> AbstractContextManager[None]:
        """[all ranks of the replica] Inside, the first rank's requests and steps are those of all.

        The others are in here until the first has left, and find nothing to do. Nothing is under way at its end.
        join: what they do with the message of `joined`.
        """
        return nullcontext()

    def joined(self, message: bytes) -> AbstractContextManager[None]:
        """[first rank, in `driven`] Inside, all ranks make the same calls again: the others call `join(message)`.

        Requests may be under way, for which the engine then is not asked for anything inside.
        """
        return nullcontext()

    def add(self, request: Request) -> None:
        """Queue a request. Refused (assertion) until `load` has been called in this process, and for a duplicate id.

        ValueError for a request longer than `capacity.max_tokens`.
        """
        ...

    def abort(self, ids: Iterable[str]) -> None:
        """Stop these requests; each comes back from the next `step` with `finish_reason='abort'` and what it has."""
        ...

    def step(self) -> list[Completion]:
        """Admit what fits, compute one token for each running request, return those that ended. No-op when idle.

        A replica of several ranks may compute a few tokens for each. An engine may compute the prompts of new requests
        in one step and the tokens of the others in another.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """The number of requests waiting and running."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights (Hugging Face names, each once) and stamp later tokens with `version`.

        Every cached key and value is dropped, but those of requests under way, which go on with them. An engine that
        cannot do that asserts `num_unfinished == 0`.
        """
        ...

    def loaded_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the weights as the engine keeps them, by the names given to `load`; None: not plain and whole."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Keep weights and KV cache on the device inside; outside they may be off it. On CPU it is free."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...
