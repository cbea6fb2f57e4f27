"""What a step asks for: which tickets, in which order, how many, and what ends it. Pure functions of the cursor.

Ticket i stands for one prompt and its answers, a pure function of the seed (`data.Prompts.ticket`). Within a step a
ticket has a *place*: 0 is the first to start. A replica claims *parts* of tickets, of `rollout.answers_per_ticket`
answers each; a ticket has one part unless that is less than a group.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from spmd_rl.config.schema import RolloutConfig


class Part(NamedTuple):
    """Some of a ticket's answers: what one replica claims, generates and scores."""

    ticket: int
    number: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """Which tickets no step has used yet: the holes, then `next` and all that follow."""

    next: int = 0
    holes: tuple[int, ...] = ()
    """Ascending, all below `next`: tickets that a step started and did not use."""

    def ticket(self, place: int) -> int:
        """The ticket at this place of the order: holes first."""
        return self.holes[place] if place < len(self.holes) else self.next + place - len(self.holes)

    def place(self, ticket: int) -> int:
        """Where in the order a ticket is that no step has used."""
        return bisect_left(self.holes, ticket) if ticket < self.next else len(self.holes) + ticket - self.next

    def after(self, used: Iterable[int]) -> "Cursor":
        """The cursor of the next step, once these tickets are used."""
        used = set(used)
        top = max([self.next, *(ticket + 1 for ticket in used)])
        return Cursor(top, tuple(t for t in (*self.holes, *range(self.next, top)) if t not in used))


@dataclass(frozen=True)
class Round:
    """One step's demand, equal on all replicas."""

    order: Cursor
    """tickets in the order of their places"""
    goal: int
    """K: tickets that qualify"""
    extra: int
    """tickets started beyond the goal at once"""
    limit: int
    """tickets that may be started"""
    parts: int = 1
    """of a ticket"""
    accept: str = "ticket"
    carried: frozenset[Part] = frozenset()
    """parts that a replica has begun in an earlier step; nobody else may claim them"""

    @property
    def sure(self) -> int:
        """Tickets that may start at once."""
        return min(self.limit, self.goal + self.extra)

    def num_open(self, below: int) -> int:
        """Parts that can be claimed, of the tickets at places under `below`."""
        return below * self.parts - bisect_left(self._closed, below * self.parts)

    def open(self, number: int) -> tuple[int, Part]:
        """(place, part) of one of the parts that can be claimed, which are numbered in order."""
        open_before = [closed - index for index, closed in enumerate(self._closed)]
        place, part = divmod(number + bisect_right(open_before, number), self.parts)
        return place, Part(self.order.ticket(place), part)

    @cached_property
    def _closed(self) -> list[int]:
        """Carried parts as numbers among all parts of the round, in order."""
        return sorted(self.order.place(part.ticket) * self.parts + part.number for part in self.carried)

    @property
    def long(self) -> bool:
        """Whether the round waits for every ticket it needs, however long its answers get."""
        return self.accept == "ticket"


def slots(settings: RolloutConfig, replicas: int, max_running: int) -> int:
    """Requests that a replica keeps under way: its share of what a step starts at once, up to what its engine runs."""
    s = settings
    share = -(-(s.prompts_per_step + s.extra_prompts) * s.answers_per_prompt // replicas)
    return max(s.answers_per_part, min(max_running, share))


def plan_round(cursor: Cursor, settings: RolloutConfig, carried: Iterable[Part] = ()) -> Round:
    """The next step's round.

    With `tail: defer`, rounds are short (the first K to arrive of K + extra fresh tickets) until K tickets have been
    left behind; then comes a long round of just these, which waits for all. So answers are cut short in no round, every
    ticket is used once, by the policy of its own step, and only every (K / extra)-th step waits for long answers
    (RollPacker, arXiv 2509.21009).
    """
    s = settings
    limit = s.max_tickets_per_step or 4 * s.prompts_per_step
    parts = -(-s.answers_per_prompt // s.answers_per_part)
    order, extra, accept = cursor, s.extra_prompts, s.accept
    if s.tail == "defer":
        waits = len(cursor.holes) >= s.prompts_per_step
        order = cursor if waits else Cursor(cursor.next)
        extra, accept = (0, "ticket") if waits else (s.extra_prompts, "arrival")
    return Round(order, s.prompts_per_step, extra, limit, parts, accept, frozenset(carried))
