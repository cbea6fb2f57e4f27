"""Which resolved tickets a step uses, and when it has enough: `rollout.accept`.

ticket    the first K qualifying tickets in the order of places: a function of outcomes alone, whoever sees them first
          and however long an answer took, so the accepted set has no length bias
arrival   the first K that qualify in time: faster, and biased to short answers
"""

import time
from collections.abc import Callable

from spmd_rl.rollout.rounds import Round
from spmd_rl.rollout.tickets import StepTickets, Store

STRIDE = 16
"""Places by which `accept: ticket` moves its frontier at once."""


class InOrder(StepTickets):
    """`accept: ticket`. The step ends at the K-th qualifying ticket of the contiguous resolved prefix.

    r/<place>   "1" if the ticket qualifies, else "0", written once by the replica that resolved it
    frontier    "<place>,<count>,<by>": all places below are resolved, so many of them qualify; written by the replica
                that resolved the place `by`
    """

    shared_keys = (*StepTickets.shared_keys, "frontier")

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._store.compare_set(self._key("frontier"), "", "0,0,")
        self._look_frontier = self._seldom(self.frontier)

    def resolve(self, place: int, qualifies: bool) -> None:
        """See `StepTickets`; any replica that resolves a ticket moves the frontier."""
        self._store.set(self._key(f"r/{place}"), "1" if qualifies else "0")
        self._mine.add(self._key(f"r/{place}"))
        if not qualifies:
            self._count_unqualified()
        self._advance(place, qualifies)

    def _advance(self, by: int, qualifies: bool) -> None:
        """Move the frontier as far as it goes, a few places at a time; the place `by` has just been resolved here.

        Whoever moves it looks again from there, so it alone goes on: one that loses the race had written its own ticket
        before the winner's next look, and leaves. Behind a long answer lie thousands of places, and many replicas.
        """
        goal, limit = self.round.goal, self.round.limit
        seen = self._store.get(self._key("frontier")).decode()
        while True:
            place, count = first, _ = _parse(seen)
            while count < goal and place < min(limit, first + STRIDE):
                found = qualifies if place == by else self._outcome(place)
                if found is None:
                    break
                count += found
                place += 1
            moved = f"{place},{count},{by}"
            if place == first or self._store.compare_set(self._key("frontier"), seen, moved).decode() != moved:
                return
            if count == goal or place == limit:
                self._write_end(str(place))
                return
            seen = moved

    def _outcome(self, place: int) -> bool | None:
        """Whether the ticket there qualifies; None if nobody has resolved it."""
        key = self._key(f"r/{place}")
        return self._store.get(key) == b"1" if self._store.check([key]) else None

    def frontier(self) -> tuple[int, int]:
        """(first unresolved place, qualifying places below it)"""
        return _parse(self._store.get(self._key("frontier")).decode())

    def qualifying(self, below: int) -> int | None:
        """How many of the places under `below` qualify; None until all of them are known to be resolved."""
        resolved, count = self._look_frontier()
        if resolved <= below:
            return count if resolved == below else None
        return sum(self._store.get(self._key(f"r/{place}")) == b"1" for place in range(below))

    def used(self, ends: list[str], counted: set[int]) -> set[int]:
        """All places up to the end."""
        assert len(set(ends)) == 1, "replicas disagree on the step's end"
        return set(range(int(ends[0])))


class ByArrival(StepTickets):
    """`accept: arrival`. The step ends with the K-th ticket that qualifies, or when all it may start are resolved.

    arrived     counter: tickets that qualify, in the order in which they came
    resolved    counter: all that the step uses up
    """

    shared_keys = (*StepTickets.shared_keys, "arrived", "resolved")

    def resolve(self, place: int, qualifies: bool) -> None:
        """See `StepTickets`; a ticket that comes after the end stays unused, and waits for a later step."""
        arrived = self._store.add(self._key("arrived"), int(qualifies))
        if qualifies and arrived > self.round.goal:
            return
        if not qualifies:
            self._count_unqualified()
        self.counted.append(place)
        resolved = self._store.add(self._key("resolved"), 1)
        if (qualifies and arrived == self.round.goal) or resolved == self.round.limit:
            self._write_end("arrived")

    def used(self, ends: list[str], counted: set[int]) -> set[int]:
        """All places that some replica counted."""
        return counted


ACCEPTS: dict[str, type[StepTickets]] = {"ticket": InOrder, "arrival": ByArrival}


def tickets(
    store: Store, prefix: str, round: Round, replicas: int = 1, clock: Callable[[], float] = time.monotonic
) -> StepTickets:
    """The tickets of a round, accepted as it says. `replicas` share the store; `clock` paces their looks at it."""
    return ACCEPTS[round.accept](store, prefix, round, replicas, clock)


def _parse(frontier: str) -> tuple[int, int]:
    place, count, _ = frontier.split(",")
    return int(place), int(count)
