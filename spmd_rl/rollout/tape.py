"""`Tape`: what the policy has answered within one episode, so that another rank can go on where this one left.

A coroutine does not travel. What it was given does: the other rank starts the episode anew, and its first calls of
`generate` are answered from the tape, as long as they ask what was asked before.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Protocol

import msgspec

from spmd_rl.rollout.rounds import GroupSlice
from spmd_rl.types import Completion


class Given(msgspec.Struct, array_like=True, frozen=True):
    """One answer of the policy."""

    prompt: bytes
    """Digest of all tokens before it."""
    completion: Completion
    """With `finish_reason='abort'`, so much of it as there was."""


Begun = dict[int, list[Given]]
"""By answer of a slice, what its episode has been given so far."""


class Tape:
    """Of one episode."""

    def __init__(self, begun: Iterable[Given] = ()) -> None:
        """begun: what it was given on another rank."""
        self.given: list[Given] = []
        """So far, in order."""
        self._begun = deque(begun)

    def recall(self, tokens: array) -> Completion | None:
        """Return what followed these tokens ('i') on the other rank; None if it was asked something else."""
        if self._begun and self._begun[0].prompt == _digest(tokens):
            return self._begun.popleft().completion
        self._begun.clear()
        return None

    def note(self, tokens: array, completion: Completion) -> None:
        """Remember what followed these tokens, in the place of a part of it."""
        given = Given(_digest(tokens), completion)
        if self.given and self.given[-1].prompt == given.prompt:
            self.given.pop()
        self.given.append(given)

    def forget(self) -> None:
        """Forget all: the episode begins again, with other random numbers."""
        self.given.clear()
        self._begun.clear()


class Handover(Protocol):
    """How a rank that leaves between two steps hands on what it has begun."""

    def leave(self, begun: Mapping[GroupSlice, Begun]) -> None:
        """Let others take these slices."""
        ...

    def take(self, group_slice: GroupSlice, rank: int) -> Begun:
        """Return what `rank` left of a slice, which is then this rank's."""
        ...


def given(tapes: Mapping[int, Tape]) -> Begun:
    """Return what a slice's episodes have been given so far."""
    return {answer: tape.given for answer, tape in tapes.items()}


def _digest(tokens: array) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=8).digest()
