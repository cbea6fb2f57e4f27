"""The plan of a step: its tickets, their order and number, and its end rule. Pure functions of the cursor.

Ticket i is the index of a prompt group: (epoch, prompt), a pure function of the seed (`data.Prompts.ticket`). Within a
step a ticket has a *position*: 0 starts first. A replica claims *slices* of `rollout.answers_per_claim` answers; by
default the whole group.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import RolloutConfig


class GroupSlice(NamedTuple):
    """Answers of one ticket that a replica generates and scores together."""

    ticket: int
    number: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """The unused tickets of a run: `skipped`, then `next` and all that follow."""

    next: int = 0
    skipped: tuple[int, ...] = ()
    """Tickets below `next` that no step has used, ascending."""

    def ticket(self, position: int) -> int:
        """Return the ticket at this position; skipped tickets come first."""
        return self.skipped[position] if position < len(self.skipped) else self.next + position - len(self.skipped)

    def position(self, ticket: int) -> int:
        """Return an unused ticket's position."""
        if ticket < self.next:
            return bisect_left(self.skipped, ticket)
        return len(self.skipped) + ticket - self.next

    def after(self, used: Iterable[int]) -> "Cursor":
        """Return the cursor after these tickets are used."""
        used = set(used)
        top = max([self.next, *(ticket + 1 for ticket in used)])
        return Cursor(top, tuple(t for t in (*self.skipped, *range(self.next, top)) if t not in used))

    def state(self, prompts: str) -> dict[str, Any]:
        """Return the state for a checkpoint. prompts: their fingerprint."""
        return {"next_ticket": self.next, "skipped": list(self.skipped), "prompts": prompts}

    @classmethod
    def of_state(cls, state: dict[str, Any], prompts: str) -> "Cursor":
        """Load a state. UserError if the prompts have changed."""
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
    goal: int
    """K: qualifying tickets that the step wants."""
    extra: int
    """Tickets beyond the goal that start at once."""
    limit: int
    """Tickets that the step may start."""
    slices: int = 1
    """Slices of each ticket."""
    accept: str = "in_order"
    carried: frozenset[GroupSlice] = frozenset()
    """Slices of an earlier step that it did not use."""
    order: tuple[int, ...] = ()
    """Initial positions in the order of claims; empty: ascending."""

    @property
    def initial_limit(self) -> int:
        """Number of tickets that may start before any is resolved."""
        return min(self.limit, self.goal + self.extra)

    @property
    def waits_for_stragglers(self) -> bool:
        """True if the step waits for all its tickets."""
        return self.accept == "in_order"

    def slice(self, number: int) -> tuple[int, GroupSlice]:
        """Return (position, slice) of the step's `number`-th slice."""
        position, number = divmod(number, self.slices)
        position = self.order[position] if position < len(self.order) else position
        return position, GroupSlice(self.cursor.ticket(position), number)


def num_slots(settings: RolloutConfig, replicas: int, max_running: int) -> int:
    """Return the concurrent requests of a replica: its share of the step's first tickets, from a slice to
    `max_running`.
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
    """Return the plan of the next step. priority_of: of a ticket; higher ones are claimed first.

    `rollout.tail=defer` (RollPacker, arXiv 2509.21009): steps are short (the first K to finish of K + `over_sample`
    fresh tickets) until K tickets have been skipped; then a long step waits for all of these. No answer is cut short,
    every ticket is used by the policy of its own step, and only every (K / `over_sample`)-th step waits for long
    answers.
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
    priorities = [priority_of(plan.cursor.ticket(position)) for position in range(plan.initial_limit)]
    if len(set(priorities)) <= 1:
        return ()
    # This step's tickets stay before those that a later one may use: `pace.last_use` relies on it.
    return tuple(sorted(range(len(priorities)), key=lambda at: (at // plan.goal, -priorities[at], at)))
