"""How a replica gets the parts it starts: `rollout.claim`.

store    from one atomic counter as slots free up, so that the fast replica does more; nobody assigns
static   dealt round-robin in waves, so that what an engine computes together never depends on time
"""

from collections import deque
from typing import Protocol

from spmd_rl.rollout.accept import InOrder
from spmd_rl.rollout.rounds import Part
from spmd_rl.rollout.tickets import StepTickets


class Claim(Protocol):
    """How a replica gets its next parts."""

    def next(self, room: int) -> list[Part]:
        """The parts to start now, in order; empty if there are none for this replica yet. `room`: parts that fit."""
        ...


class StoreClaim:
    """`claim: store`.

    A replica takes all that it has room for at once, and whole tickets where it can: the answers of one prompt then
    meet in one prefix cache, and a ticket is split where slots are short.
    """

    def __init__(self, tickets: StepTickets) -> None:
        self._tickets = tickets
        self._reserved: deque[int] = deque()
        self._taken: int | None = None
        """parts that all replicas together had taken when this one last did"""

    @property
    def waits_for(self) -> int | None:
        """The place of the part reserved here that may not start yet."""
        round = self._tickets.round
        if not self._reserved or self._reserved[0] >= round.num_open(round.limit):
            return None
        return round.open(self._reserved[0])[0]

    def next(self, room: int) -> list[Part]:
        """See `Claim`. A part that may not start yet stays reserved here."""
        round, parts = self._tickets.round, []
        num_open = round.num_open(round.limit)
        while room > 0:
            if not self._reserved:
                self._reserved.extend(self._take(room))
            while self._reserved and room > 0:
                if self._reserved[0] >= num_open:
                    return parts
                place, part = round.open(self._reserved[0])
                if not self._tickets.may_start(place):
                    return parts
                self._reserved.popleft()
                parts.append(part)
                room -= 1
        return parts

    def _take(self, room: int) -> range:
        """As many parts as fit, in whole tickets; those of one where they might have to wait, or it is the first."""
        round = self._tickets.round
        surely = 0 if self._taken is None else min(room, round.num_open(round.sure) - self._taken)
        taken = self._tickets.take(max(surely - surely % round.parts, min(room, round.parts)))
        self._taken = taken.stop
        return taken


class StaticClaim:
    """`claim: static`, for `accept: ticket`.

    The first wave has the goal and the extra tickets; when all of a wave are resolved and the goal is not reached, the
    next has as many as are missing.
    """

    def __init__(self, tickets: InOrder, replica: int, replicas: int) -> None:
        self._tickets, self._replicas = tickets, replicas
        self._next, round = replica, tickets.round
        self._wave_end = round.sure

    def next(self, room: int) -> list[Part]:
        """See `Claim`. A whole wave starts at once, whatever `room` says: the engine queues it in order."""
        round, parts = self._tickets.round, []
        while True:
            while self._next < round.num_open(self._wave_end):
                parts.append(round.open(self._next)[1])
                self._next += self._replicas
            if parts or self._wave_end == round.limit:
                return parts
            qualifying = self._tickets.qualifying(self._wave_end)
            if qualifying is None or qualifying >= round.goal:
                return parts
            self._wave_end = min(round.limit, self._wave_end + round.goal - qualifying)


def claim(name: str, tickets: StepTickets, replica: int, replicas: int) -> Claim:
    """The claim called `name` in `rollout.claim`."""
    if name == "store":
        return StoreClaim(tickets)
    assert isinstance(tickets, InOrder), "claim: static needs accept: ticket"
    return StaticClaim(tickets, replica, replicas)
