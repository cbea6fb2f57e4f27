"""What one step asks for: which tickets, in which order, how many, and what ends it. Pure functions of the cursor.

Ticket i is the index of a prompt group: (epoch, prompt), a pure function of the seed (`data.Prompts.ticket`). Within a
step a ticket has a *position*: 0 starts first. A replica claims *slices* of a ticket's group of answers, each of
`rollout.answers_per_claim` answers; by default a slice is the whole group.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import RolloutConfig


class GroupSlice(NamedTuple):
    """Some of the answers of one ticket: what one replica claims, generates and scores."""

    ticket: int
    number: int
    """Which slice of the ticket's group this is, from 0."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The tickets that no step has used yet: those skipped, then `next` and all that follow."""

    next: int = 0
    skipped: tuple[int, ...] = ()
    """Tickets below `next` that a step started and did not use, ascending."""

    def ticket(self, position: int) -> int:
        """Return the ticket at this position of the order, in which skipped tickets come first."""
        return self.skipped[position] if position < len(self.skipped) else self.next + position - len(self.skipped)

    def position(self, ticket: int) -> int:
        """Return the position of a ticket that no step has used."""
        if ticket < self.next:
            return bisect_left(self.skipped, ticket)
        return len(self.skipped) + ticket - self.next

    def after(self, used: Iterable[int]) -> "Cursor":
        """Return the cursor of the next step, once these tickets are used."""
        used = set(used)
        top = max([self.next, *(ticket + 1 for ticket in used)])
        return Cursor(top, tuple(t for t in (*self.skipped, *range(self.next, top)) if t not in used))

    def state(self, prompts: str) -> dict[str, Any]:
        """Return what a checkpoint holds of it, with the fingerprint of the prompts that the tickets stand for."""
        return {"next_ticket": self.next, "skipped": list(self.skipped), "prompts": prompts}

    @classmethod
    def of_state(cls, state: dict[str, Any], prompts: str) -> "Cursor":
        """Return the inverse. UserError if the tickets would now stand for other prompts."""
        if state["prompts"] != prompts:
            raise UserError(
                "data.train: the prompts are not those of the checkpoint; to train on others from its weights, say "
                "policy.model=<checkpoint>/hf"
            )
        return cls(state["next_ticket"], tuple(state["skipped"]))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step asks for, equal on all replicas."""

    cursor: Cursor
    """Which ticket stands at a position."""
    goal: int
    """K: the number of qualifying tickets that the step wants."""
    extra: int
    """The number of tickets that start at once beyond the goal."""
    limit: int
    """The number of tickets that the step may start in all."""
    slices: int = 1
    """The number of slices of each ticket."""
    accept: str = "in_order"
    """See `rollout.accept`."""
    carried: frozenset[GroupSlice] = frozenset()
    """Slices that a replica began in an earlier step and goes on with; nobody else may start them."""
    order: tuple[int, ...] = ()
    """The initial positions as they are claimed, where priorities differ; beyond it, and by default: from 0 on."""

    @property
    def initial_limit(self) -> int:
        """The number of tickets that may start before any has been resolved."""
        return min(self.limit, self.goal + self.extra)

    @property
    def waits_for_stragglers(self) -> bool:
        """Whether the step waits for every ticket that it needs, however long its answers get."""
        return self.accept == "in_order"

    def slice(self, number: int) -> tuple[int, GroupSlice]:
        """Return (position, slice) for the number of a slice among all slices of the step."""
        position, number = divmod(number, self.slices)
        position = self.order[position] if position < len(self.order) else position
        return position, GroupSlice(self.cursor.ticket(position), number)


def num_slots(settings: RolloutConfig, replicas: int, max_running: int) -> int:
    """Return how many requests a replica keeps under way.

    That is its share of what a step starts at once, at most what its engine runs (`max_running`), and at least a slice.
    """
    s = settings
    share = -(-(s.prompts_per_step + s.over_sample) * s.answers_per_prompt // replicas)
    return max(s.slice_size, min(max_running, share))


def plan_step(
    cursor: Cursor,
    settings: RolloutConfig,
    carried: Iterable[GroupSlice] = (),
    priority_of: Callable[[int], float] = lambda ticket: 0.0,
) -> StepPlan:
    """Return the plan of the next step; `priority_of` a ticket: those with a higher one are claimed first.

    With `rollout.tail=defer`, steps are short (the first K to finish of K + `over_sample` fresh tickets) until K
    tickets have been skipped; then comes a long step of just these, which waits for all. So answers are cut short in
    no step, every ticket is used once, by the policy of its own step, and only every (K / `over_sample`)-th step waits
    for long answers (RollPacker, arXiv 2509.21009).
    """
    s, extra, accept = settings, settings.over_sample, settings.accept
    if s.tail == "defer":
        is_long = len(cursor.skipped) >= s.prompts_per_step
        cursor = cursor if is_long else Cursor(cursor.next)
        extra, accept = (0, "in_order") if is_long else (s.over_sample, "first_finished")
    plan = StepPlan(
        cursor=cursor,
        goal=s.prompts_per_step,
        extra=extra,
        limit=s.max_prompts_per_step or 4 * s.prompts_per_step,
        slices=-(-s.answers_per_prompt // s.slice_size),
        accept=accept,
        carried=frozenset(carried),
    )
    return replace(plan, order=_claim_order(plan, priority_of))


def _claim_order(plan: StepPlan, priority_of: Callable[[int], float]) -> tuple[int, ...]:
    """See `StepPlan.order`. Positions are what they were, and with them what the step accepts.

    What this step needs stays before what may be left to a later one (`pace.oldest_version_at` relies on it).
    """
    priorities = [priority_of(plan.cursor.ticket(position)) for position in range(plan.initial_limit)]
    if len(set(priorities)) <= 1:
        return ()
    return tuple(sorted(range(len(priorities)), key=lambda at: (at // plan.goal, -priorities[at], at)))
