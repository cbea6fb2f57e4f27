"""`ReplayLog`: what the policy has answered within one episode, so that another rank can go on where this one stopped.

A coroutine does not travel. What it was answered does: the other rank starts the episode anew, and its first calls of
`generate` are answered from the log, as long as they ask what was asked before.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Protocol

import msgspec

from spmd_rl.rollout.step_plan import GroupSlice
from spmd_rl.types import Completion


class Recorded(msgspec.Struct, array_like=True, frozen=True):
    """One answer of the policy."""

    prompt: bytes
    """Digest of all tokens before it."""
    completion: Completion
    """With `finish_reason='abort'`, so much of it as there was."""


PartialRollouts = dict[int, list[Recorded]]
"""By answer of a slice, what its episode has been answered so far."""


class ReplayLog:
    """The answers of the policy within one episode."""

    def __init__(self, recorded: Iterable[Recorded] = ()) -> None:
        """recorded: what the episode was answered on another rank."""
        self.records: list[Recorded] = []
        """What the episode has been answered so far, in order."""
        self._to_replay = deque(recorded)

    def replay(self, tokens: array) -> Completion | None:
        """Return what followed these tokens ('i') on the other rank; None if it was asked something else."""
        if self._to_replay and self._to_replay[0].prompt == _digest(tokens):
            return self._to_replay.popleft().completion
        self._to_replay.clear()
        return None

    def record(self, tokens: array, completion: Completion) -> None:
        """Remember what followed these tokens, in the place of a part of it."""
        record = Recorded(_digest(tokens), completion)
        if self.records and self.records[-1].prompt == record.prompt:
            self.records.pop()
        self.records.append(record)

    def clear(self) -> None:
        """Forget all: the episode begins again, with other random numbers."""
        self.records.clear()
        self._to_replay.clear()


class Migration(Protocol):
    """How slices that a rank has not finished move to another rank, where some ranks leave between two steps."""

    leaves: bool
    """Whether this rank does."""

    def offer(self, partial: Mapping[GroupSlice, PartialRollouts]) -> None:
        """Let other ranks claim these slices of this rank's, which it has played so far."""
        ...

    def claim(self, group_slice: GroupSlice) -> PartialRollouts:
        """Return what another rank has played of a slice that is now this rank's; nothing of a fresh one."""
        ...


def _digest(tokens: array) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=8).digest()
