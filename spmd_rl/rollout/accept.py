"""Which resolved tickets a step uses, and when it has enough: `rollout.accept`.

ticket    the first K qualifying tickets in the order of places: a function of outcomes alone, whoever sees them first
          and however long an answer took, so the accepted set has no length bias
arrival   the first K that qualify in time: faster, and biased to short answers
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from spmd_rl.rollout.rounds import Round
from spmd_rl.rollout.tickets import StepTickets, Store

BLOCK = 31
"""Places whose outcomes share one counter of the store: two bits each, in 64 with a sign."""
RESOLVED = sum(1 << 2 * slot for slot in range(BLOCK))
"""The first bit of each place."""
START = "0,0"
"""The frontier of a step that has just begun."""


class InOrder(StepTickets):
    """`accept: ticket`. The step ends at the K-th qualifying ticket of the contiguous resolved prefix.

    b/<n>       outcomes of BLOCK places, added by whoever resolves one, who thereby learns of the others: bit 2 i that
                place n BLOCK + i is resolved, bit 2 i + 1 that it qualifies
    frontier    "<n>,<count>": all blocks below n are whole, and so many of their places qualify; none: START
    """

    shared_keys = (*StepTickets.shared_keys, "frontier")

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._resolved, self._looked_at = 0, -math.inf

    def ended(self, under_way: int | None = None) -> bool:
        """See `StepTickets`. No step ends before its first K places are resolved: then there is no need to look."""
        return (under_way is None or under_way >= self.round.goal) and super().ended(under_way)

    def resolve(self, outcomes: Mapping[int, bool]) -> None:
        """See `StepTickets`; any replica that resolves a ticket moves the frontier.

        Only one that closes a gap at the beginning of a block can move anything: behind a long answer lie thousands of
        places, and nobody walks them before it has ended.
        """
        added: dict[int, int] = defaultdict(int)
        for place, qualifies in outcomes.items():
            added[place // BLOCK] |= (3 if qualifies else 1) << 2 * (place % BLOCK)
        moved = {block: (self._add(block, new), new) for block, new in added.items()}
        if unqualified := list(outcomes.values()).count(False):
            self._tell(unqualified)
        for block, (known, new) in moved.items():
            if new & (1 << 2 * _prefix(known)) - 1:
                self._advance(block, known)

    def _frontier(self) -> str:
        """Where it is. At the beginning nobody has written it: then the store gives back what is expected."""
        return self._store.compare_set(self._key("frontier"), START, START).decode()

    def _advance(self, block: int, outcomes: int) -> None:
        """Move the frontier, if it is at this block, as far as it goes.

        If it is below, whoever moves it here reads the block's outcomes after that, and sees ours among them.
        """
        goal, limit = self.round.goal, self.round.limit
        # nobody can have left the first block before all of it is known
        seen = START if block == 0 and _prefix(outcomes) < BLOCK else self._frontier()
        while _parse(seen)[0] == block:
            count, known = _parse(seen)[1], min(_prefix(outcomes), limit - block * BLOCK)
            for slot in range(known):
                count += outcomes >> 2 * slot + 1 & 1
                if count == goal:
                    self._write_end(str(block * BLOCK + slot + 1))
                    return
            if block * BLOCK + known == limit:
                self._write_end(str(limit))
            if known < BLOCK:
                return
            moved = f"{block + 1},{count}"
            expected = "" if seen == START else seen
            seen = self._store.compare_set(self._key("frontier"), expected, moved).decode()
            block += 1
            outcomes = self._add(block, 0)

    def _add(self, block: int, outcome: int) -> int:
        """All outcomes of a block with this one. Whoever comes first will delete them."""
        outcomes = self._store.add(key := self._key(f"b/{block}"), outcome)
        if outcomes == outcome:
            self._mine.add(key)
        return outcomes

    def resolved(self) -> int:
        """Places of the contiguous resolved prefix."""
        block, _ = _parse(self._frontier())
        return block * BLOCK + _prefix(self._add(block, 0))

    def qualifying(self, below: int) -> int | None:
        """How many of the places under `below` qualify; None until all of them are known to be resolved."""
        now = self._clock()
        if self._resolved < below and now - self._looked_at >= self.pause:
            self._resolved, self._looked_at = self.resolved(), now
        if self._resolved < below:
            return None
        outcomes = [self._add(block, 0) for block in range(-(-below // BLOCK))]
        return sum(outcomes[place // BLOCK] >> 2 * (place % BLOCK) + 1 & 1 for place in range(below))

    def used(self, ends: list[str], counted: set[int]) -> set[int]:
        """All places up to the end."""
        assert len(set(ends)) == 1, "replicas disagree on the step's end"
        return set(range(int(ends[0])))


def _prefix(outcomes: int) -> int:
    """Resolved places at the beginning of a block."""
    missing = ~outcomes & RESOLVED
    return (missing & -missing).bit_length() // 2 if missing else BLOCK


class ByArrival(StepTickets):
    """`accept: arrival`. The step ends with the K-th ticket that qualifies, or when all it may start are resolved.

    arrived     counter: tickets that qualify, in the order in which they came
    resolved    counter: all that the step uses up
    """

    shared_keys = (*StepTickets.shared_keys, "arrived", "resolved")

    def resolve(self, outcomes: Mapping[int, bool]) -> None:
        """See `StepTickets`; a ticket that comes after the end stays unused, and waits for a later step."""
        for place, qualifies in outcomes.items():
            self._resolve(place, qualifies)

    def _resolve(self, place: int, qualifies: bool) -> None:
        arrived = self._store.add(self._key("arrived"), int(qualifies))
        if qualifies and arrived > self.round.goal:
            return
        if not qualifies:
            self._tell(1)
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
    block, count = frontier.split(",")
    return int(block), int(count)
