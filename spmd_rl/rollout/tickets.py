"""The tickets of one step on a store that all replicas share, and the rule that ends the step, with no one in charge.

    claimed       counter: the next open part to hand out
    unqualified   counter: resolved tickets that will not train; each lets one more ticket start
    p/<place>     parts of the ticket whose answers are judged, where a ticket has several; p/<place>/<n>: their scores
    end           written once: the step has ended

How a ticket is accepted is `accept.py`'s. Operations per ticket do not grow with the number of replicas, and what a
replica merely looks at it looks at so seldom that all of them together ask `LOOKS_PER_SECOND` times.

Left out: engines, prompts and scores; the simulator drives this very code with a store and a clock of its own.
"""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from spmd_rl.rollout.rounds import Round

LOOKS_PER_SECOND = 10_000
"""Over all replicas. A TCPStore answers some 35,000 a second."""
LOOK_SECONDS = 0.002
"""Of one replica at the most often: nobody waits longer than that for the end of a step."""

T = TypeVar("T")


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
        """Write `desired` if the value is `expected` (empty: none yet); what is there afterwards."""
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
        self._look_end = self._seldom(self._read_end)
        self._look_unqualified = self._seldom(lambda: store.add(self._key("unqualified"), 0))
        self._ended = False

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def take(self, count: int) -> range:
        """Indices into `round.open` of the next `count` unclaimed parts.

        They may lie beyond what the step needs: then they are nobody's, and start later.
        """
        end = self._store.add(self._key("claimed"), count)
        return range(end - count, end)

    def allowed(self) -> int:
        """Places below this one may start now: the goal, the extra ones, and one for each that did not qualify."""
        return min(self.round.limit, self.round.goal + self.round.extra + self._look_unqualified())

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

    def resolve(self, place: int, qualifies: bool) -> None:
        """All verdicts of the ticket at `place` are in."""
        raise NotImplementedError

    def used(self, ends: list[str], counted: set[int]) -> set[int]:
        """Places that the step uses up, from what all replicas say at its end: `end_mark()` and `counted`."""
        raise NotImplementedError

    def ended(self) -> bool:
        """Whether the step has ended, as far as this replica knows."""
        self._ended = self._ended or self._look_end()
        return self._ended

    def end_mark(self) -> str:
        """What was written at the end."""
        return self._store.get(self._key("end")).decode()

    def _seldom(self, look: Callable[[], T]) -> Callable[[], T]:
        """`look`, but what it last saw if that is newer than this replica's share of `LOOKS_PER_SECOND`."""
        seen: list[tuple[float, T]] = []

        def look_or_remember() -> T:
            now = self._clock()
            if not seen or now - seen[0][0] >= self.pause:
                seen[:] = [(now, look())]
            return seen[0][1]

        return look_or_remember

    def _read_end(self) -> bool:
        return self._store.check([self._key("end")])

    def _write_end(self, mark: str) -> None:
        self._store.compare_set(self._key("end"), "", mark)
        self._ended = True

    def _count_unqualified(self) -> None:
        self._store.add(self._key("unqualified"), 1)

    shared_keys: tuple[str, ...] = ("claimed", "unqualified", "end")

    def forget(self, shared: bool) -> None:
        """Delete the keys this replica wrote, and the step's own if `shared`; when no replica can still read them."""
        names = self.shared_keys if shared else ()
        for key in [*sorted(self._mine), *map(self._key, names)]:
            self._store.delete_key(key)
        self._mine.clear()
