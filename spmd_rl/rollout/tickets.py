"""Tickets: who generates what, and when a step ends, with no one in charge.

Ticket i stands for one prompt and its answers, a pure function of the seed (`data.Prompts.ticket`). The replicas share
one key-value store and four kinds of keys a step:

    claimed       counter: the next ticket to hand out
    unqualified   counter: resolved tickets that will not train; each lets one more ticket start
    r/<ticket>    "1" if its group qualifies for training, else "0", written once by the replica that made it
    frontier      "<ticket>,<count>": all tickets below are resolved, so many of them qualify
    end           the first ticket that the step does not use, written once; the next step starts there

The step ends at the K-th qualifying ticket of the contiguous resolved prefix: a function of outcomes, whoever sees it
first and however long an answer took, so the accepted set has no length bias. Any replica that resolves a ticket moves
the frontier; store operations per ticket do not grow with the number of replicas.

Left out: engines, prompts and scores; a simulator can drive this with a store of its own.
"""

from typing import Protocol

from torch.distributed import Store


class StepTickets:
    """The tickets of one step, as one replica sees them."""

    def __init__(self, store: Store, prefix: str, first: int, goal: int, extra: int, limit: int) -> None:
        """Tickets `first`, `first + 1`, ... of a step that wants `goal` qualifying ones and may start `limit`."""
        self.first, self.goal, self.extra = first, goal, extra
        self.last = first + limit  # exclusive
        self._store, self._prefix = store, prefix
        self._mine: list[str] = []
        store.compare_set(self._key("frontier"), "", f"{first},0")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def take(self) -> int:
        """The next unclaimed ticket. It may lie beyond what the step needs: then it is nobody's, and starts later."""
        return self.first + self._store.add(self._key("claimed"), 1) - 1

    def allowed(self) -> int:
        """Tickets below this one may start now: the goal, the extra ones, and one for each that did not qualify."""
        unqualified = self._store.add(self._key("unqualified"), 0)
        return min(self.last, self.first + self.goal + self.extra + unqualified)

    def resolve(self, ticket: int, qualifies: bool) -> None:
        """All verdicts of `ticket` are in."""
        self._store.set(self._key(f"r/{ticket}"), "1" if qualifies else "0")
        self._mine.append(self._key(f"r/{ticket}"))
        if not qualifies:
            self._store.add(self._key("unqualified"), 1)
        self._advance()

    def _advance(self) -> None:
        """Move the frontier as far as it goes. Lock-free: whoever loses the race looks again from the new frontier."""
        while True:
            seen = self._store.get(self._key("frontier")).decode()
            ticket, count = _parse(seen)
            while count < self.goal and ticket < self.last and self._store.check([self._key(f"r/{ticket}")]):
                count += self._store.get(self._key(f"r/{ticket}")) == b"1"
                ticket += 1
            moved = f"{ticket},{count}"
            if moved == seen:
                return
            if self._store.compare_set(self._key("frontier"), seen, moved).decode() != moved:
                continue
            if count == self.goal or ticket == self.last:
                self._store.compare_set(self._key("end"), "", str(ticket))
                return

    def frontier(self) -> tuple[int, int]:
        """(first unresolved ticket, qualifying tickets below it)"""
        return _parse(self._store.get(self._key("frontier")).decode())

    def qualifying(self, below: int) -> int | None:
        """How many of the tickets under `below` qualify; None until all of them are resolved."""
        resolved, count = self.frontier()
        if resolved <= below:
            return count if resolved == below else None
        return sum(self._store.get(self._key(f"r/{t}")) == b"1" for t in range(self.first, below))

    def end(self) -> int | None:
        """The first ticket that the step does not use, once it is known."""
        key = self._key("end")
        return int(self._store.get(key)) if self._store.check([key]) else None

    def forget(self, shared: bool) -> None:
        """Delete the keys this replica wrote, and the step's own if `shared`; when no replica can still read them."""
        names = ("claimed", "unqualified", "frontier", "end") if shared else ()
        for key in [*self._mine, *map(self._key, names)]:
            self._store.delete_key(key)
        self._mine.clear()


def _parse(frontier: str) -> tuple[int, int]:
    ticket, count = frontier.split(",")
    return int(ticket), int(count)


class Claim(Protocol):
    """How a replica gets its next ticket."""

    def next(self, room: bool) -> int | None:
        """The ticket to start now; None if there is none for this replica yet. `room`: the engine has free slots."""
        ...


class StoreClaim:
    """`claim: store`: take the next ticket as slots free up, so that the fast replica does more."""

    def __init__(self, tickets: StepTickets) -> None:
        self._tickets = tickets
        self._reserved: int | None = None

    def next(self, room: bool) -> int | None:
        """See `Claim`. A ticket that may not start yet stays reserved here."""
        if not room:
            return None
        if self._reserved is None:
            self._reserved = self._tickets.take()
        if self._reserved >= self._tickets.allowed():
            return None
        ticket, self._reserved = self._reserved, None
        return ticket


class StaticClaim:
    """`claim: static`: dealt round-robin in waves, so that what an engine computes together never depends on time.

    The first wave has the goal and the extra tickets; when all of a wave are resolved and the goal is not reached, the
    next has as many as are missing.
    """

    def __init__(self, tickets: StepTickets, replica: int, replicas: int) -> None:
        self._tickets, self._replicas = tickets, replicas
        self._next = tickets.first + replica
        self._wave_end = min(tickets.last, tickets.first + tickets.goal + tickets.extra)

    def next(self, room: bool) -> int | None:
        """See `Claim`. A whole wave starts at once, whatever `room` says: the engine queues it in order."""
        while self._next >= self._wave_end:
            qualifying = self._tickets.qualifying(self._wave_end)
            if qualifying is None or qualifying >= self._tickets.goal or self._wave_end == self._tickets.last:
                return None
            self._wave_end = min(self._tickets.last, self._wave_end + self._tickets.goal - qualifying)
        ticket, self._next = self._next, self._next + self._replicas
        return ticket


CLAIMS = ("store", "static")


def claim(name: str, tickets: StepTickets, replica: int, replicas: int) -> Claim:
    """The claim called `name` in `rollout.claim`."""
    return StoreClaim(tickets) if name == "store" else StaticClaim(tickets, replica, replicas)
