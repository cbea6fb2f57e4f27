"""`Transcript`: the policy's answers within one episode, so that another rank can go on with it.

The other rank plays the episode from its beginning, and takes the answer to each call of `generate` from the
transcript, as long as the prompt is the same.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from spmd_rl.types import Completion


class PolicyAnswer(msgspec.Struct, array_like=True, frozen=True):
    """One answer of the policy."""

    prompt: bytes
    completion: Completion
    """An unfinished answer has `finish_reason='abort'`."""


class Transcript:
    """The answers of the policy within one episode."""

    def __init__(self, earlier: Iterable[PolicyAnswer] = ()) -> None:
        """earlier: the answers on another rank."""
        self.answers: list[PolicyAnswer] = []
        self._earlier = deque(earlier)

    def replay(self, tokens: array) -> Completion | None:
        """Return the earlier answer to these tokens ('i'); None if something else was asked."""
        if self._earlier and self._earlier[0].prompt == _digest(tokens):
            return self._earlier.popleft().completion
        self._earlier.clear()
        return None

    def add(self, tokens: array, completion: Completion) -> None:
        """Append the answer to these tokens ('i'), replacing an unfinished one."""
        answered = PolicyAnswer(_digest(tokens), completion)
        if self.answers and self.answers[-1].prompt == answered.prompt:
            self.answers.pop()
        self.answers.append(answered)

    def clear(self) -> None:
        """Forget all answers: the episode begins again."""
        self.answers.clear()
        self._earlier.clear()


def _digest(tokens: array) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=8).digest()
