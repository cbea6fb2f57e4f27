"""The tickets of one step on a store that all replicas share, and the rule that ends the step, with no one in charge.

    claimed       counter: the next open part to hand out
    news          counter: resolved tickets that will not train (each lets one more start), and ENDED at the end
    p/<place>     parts of the ticket whose answers are judged, where a ticket has several; p/<place>/<n>: their scores
    end           written once: what the step ended with

How a ticket is accepted is `accept.py`'s. Operations per ticket do not grow with the number of replicas, and what a
replica merely looks at it looks at so seldom that all of them together ask `LOOKS_PER_SECOND` times.

Left out: engines, prompts and scores; the simulator drives this very code with a store and a clock of its own.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from spmd_rl.rollout.rounds import Round

LOOKS_PER_SECOND = 10_000
"""Over all replicas. A TCPStore answers some 35,000 a second."""
LOOK_SECONDS = 0.005
"""Of one replica at the most often: so long a step's end waits for it, at most, if its engine is at work."""
ENDED = 1 << 32
"""In `news`, above any number of tickets."""


class Store(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def add(self, key: str, amount: int, /) -> int:
        """The counter's new value."""
        ...

    def set(self, key: str, value: str | bytes, /) -> None:
        """Write."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read what is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write `desired` if the value is `expected` (empty: none yet); what is there afterwards, or `expected`."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Forget."""
        ...


class StepTickets:
    """One step as one replica sees it. What ends it comes from a subclass: `accept.tickets()` makes the right one."""

    def __init__(
        self, store: Store, prefix: str, round: Round, replicas: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.round = round
        self.counted: list[int] = []
        """Places that the step uses up as far as this replica has seen; `used` says the whole."""
        self._store, self._prefix = store, prefix
        self._mine: set[str] = set()
        self.pause = max(LOOK_SECONDS, replicas / LOOKS_PER_SECOND) if replicas > 1 else 0.0
        """Seconds between two looks of this replica at the same thing, at least."""
        self._clock = clock
        self._alone = replicas == 1
        self._known, self._known_at = 0, -math.inf
        """of `news`, and when"""
        self._end_mark = ""

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def take(self, count: int) -> range:
        """Numbers, as `round.open` knows them, of the next `count` unclaimed parts.

        They may lie beyond what the step needs: then they are nobody's, and start later.
        """
        end = self._store.add(self._key("claimed"), count)
        return range(end - count, end)

    def may_start(self, place: int) -> bool:
        """Whether the ticket there may start now: the goal, the extra ones, and one for each that did not qualify."""
        sure = self.round.sure
        return place < sure or place < min(self.round.limit, sure + self._news() % ENDED)

    def pool(self, place: int, number: int, scores: bytes) -> list[bytes] | None:
        """All parts' scores, by number, if this part is the last of its ticket; else None: another will be."""
        if self.round.parts == 1:
            return [scores]
        key = self._key(f"p/{place}")
        self._store.set(f"{key}/{number}", scores)
        self._mine |= {key, f"{key}/{number}"}
        if self._store.add(key, 1) < self.round.parts:
            return None
        return [self._store.get(f"{key}/{n}") for n in range(self.round.parts)]

    def resolve(self, outcomes: Mapping[int, bool]) -> None:
        """All verdicts of the tickets at these places are in; whether each qualifies."""
        raise NotImplementedError

    def used(self, ends: list[str], counted: set[int]) -> set[int]:
        """Places that the step uses up, from what all replicas say at its end: `end_mark()` and `counted`."""
        raise NotImplementedError

    def ended(self, under_way: int | None = None) -> bool:
        """Whether the step has ended, as far as this replica knows. `under_way`: a place that it still works on."""
        return self._known >= ENDED or self._news() >= ENDED

    def end_mark(self) -> str:
        """What was written at the end."""
        return self._end_mark or self._store.get(self._key("end")).decode()

    def _tell(self, news: int) -> None:
        """Add to the news, and hear of the others'."""
        self._known, self._known_at = self._store.add(self._key("news"), news), self._clock()

    def _news(self) -> int:
        """What this replica knows of the news; it asks for the others' where there are any."""
        if not self._alone and self._clock() - self._known_at >= self.pause:
            self._tell(0)
        return self._known

    def _write_end(self, mark: str) -> None:
        self._end_mark = self._store.compare_set(self._key("end"), "", mark).decode()
        self._tell(ENDED)

    shared_keys: tuple[str, ...] = ("claimed", "news", "end")

    def forget(self, shared: bool) -> None:
        """Delete the keys this replica wrote, and the step's own if `shared`; when no replica can still read them."""
        names = self.shared_keys if shared else ()
        for key in [*sorted(self._mine), *map(self._key, names)]:
            self._store.delete_key(key)
        self._mine.clear()
