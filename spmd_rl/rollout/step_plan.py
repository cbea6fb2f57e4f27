"""The plan of a step: its tickets, their order and number, and its end rule. Pure functions of the cursor.

Ticket i is the index of a prompt group: (epoch, prompt), a pure function of the seed (`data.Prompts.ticket`). Within a
step a ticket has a *position*: 0 starts first. A replica claims *slices* of a group, each of
`rollout.answers_per_claim` answers; by default a slice is the whole group.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import RolloutConfig


class GroupSlice(NamedTuple):
    """Answers of one ticket that a replica claims, generates and scores together."""

    ticket: int
    number: int
    """Index of the slice in its group, from 0."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The unused tickets of a run: `skipped`, then `next` and all that follow."""

    next: int = 0
    skipped: tuple[int, ...] = ()
    """Tickets below `next` that a step started and did not use, ascending."""

    def ticket(self, position: int) -> int:
        """Return the ticket at this position; skipped tickets come first."""
        return self.skipped[position] if position < len(self.skipped) else self.next + position - len(self.skipped)

    def position(self, ticket: int) -> int:
        """Return the position of an unused ticket."""
        if ticket < self.next:
            return bisect_left(self.skipped, ticket)
        return len(self.skipped) + ticket - self.next

    def after(self, used: Iterable[int]) -> "Cursor":
        """Return the cursor after these tickets are used."""
        used = set(used)
        top = max([self.next, *(ticket + 1 for ticket in used)])
        return Cursor(top, tuple(t for t in (*self.skipped, *range(self.next, top)) if t not in used))

    def state(self, prompts: str) -> dict[str, Any]:
        """Return the state for a checkpoint, with the prompts' fingerprint."""
        return {"next_ticket": self.next, "skipped": list(self.skipped), "prompts": prompts}

    @classmethod
    def of_state(cls, state: dict[str, Any], prompts: str) -> "Cursor":
        """Return the cursor of a state. UserError if the prompts have changed."""
        if state["prompts"] != prompts:
            raise UserError(
                "data.train: the prompts are not those of the checkpoint; to train on others from its weights, set "
                "policy.model=<checkpoint>/hf"
            )
        return cls(state["next_ticket"], tuple(state["skipped"]))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step, equal on all replicas."""

    cursor: Cursor
    """Maps positions to tickets."""
    goal: int
    """K: number of qualifying tickets that the step wants."""
    extra: int
    """Number of tickets beyond the goal that start at once."""
    limit: int
    """Limit of tickets that the step may start."""
    slices: int = 1
    """Number of slices of each ticket."""
    accept: str = "in_order"
    """See `rollout.accept`."""
    carried: frozenset[GroupSlice] = frozenset()
    """Unfinished slices of an earlier step, which are not claimed again."""
    order: tuple[int, ...] = ()
    """Initial positions in the order of claims, where priorities differ; by default ascending."""

    @property
    def initial_limit(self) -> int:
        """Number of tickets that may start before any is resolved."""
        return min(self.limit, self.goal + self.extra)

    @property
    def waits_for_stragglers(self) -> bool:
        """True if the step waits for all its tickets, regardless of their length."""
        return self.accept == "in_order"

    def slice(self, number: int) -> tuple[int, GroupSlice]:
        """Return (position, slice) for the number of a slice in the step."""
        position, number = divmod(number, self.slices)
        position = self.order[position] if position < len(self.order) else position
        return position, GroupSlice(self.cursor.ticket(position), number)


def num_slots(settings: RolloutConfig, replicas: int, max_running: int) -> int:
    """Return the number of concurrent requests of a replica: its share of the step's first tickets, at most
    `max_running`, and at least a slice."""
    s = settings
    share = -(-(s.prompts_per_step + s.over_sample) * s.answers_per_prompt // replicas)
    return max(s.slice_size, min(max_running, share))


def plan_step(
    cursor: Cursor,
    settings: RolloutConfig,
    carried: Iterable[GroupSlice] = (),
    priority_of: Callable[[int], float] = lambda ticket: 0.0,
) -> StepPlan:
    """Return the plan of the next step. priority_of: of a ticket; higher ones are claimed first.

    With `rollout.tail=defer`, steps are short (the first K to finish of K + `over_sample` fresh tickets) until K
    tickets have been skipped; then a long step waits for all of these (`Rollouts` keeps the skipped ones). So no answer
    is cut short, every ticket is used once by the policy of its own step, and only every (K / `over_sample`)-th step
    waits for long answers (RollPacker, arXiv 2509.21009).
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
    """Return `StepPlan.order`. Positions stay the same, and so does what the step accepts.

    Tickets of this step stay before those that a later one may use (`pace.last_use` relies on it).
    """
    priorities = [priority_of(plan.cursor.ticket(position)) for position in range(plan.initial_limit)]
    if len(set(priorities)) <= 1:
        return ()
    return tuple(sorted(range(len(priorities)), key=lambda at: (at // plan.goal, -priorities[at], at)))
