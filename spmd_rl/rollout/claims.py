"""`rollout.claim`: how a replica obtains the slices that it starts.

store    from one atomic counter as slots free up: a fast replica does more
static   round-robin in waves: what an engine computes together never depends on time
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from spmd_rl.rollout.coordinator import Coordinator, FirstKInOrder
from spmd_rl.rollout.step_plan import GroupSlice


class SliceClaim(Protocol):
    """Source of a replica's next slices."""

    def next(self, room: int) -> list[GroupSlice]:
        """Return at most `room` slices to start now, in order; empty if none may start yet."""
        ...

    def ahead(self, room: int) -> list[GroupSlice]:
        """Do as `next`, but before the policy's update; see `Rollouts.start_ahead`."""
        ...


MayBegin = Callable[[int], bool]
"""True if this replica's policy is new enough for the ticket at a position of the step."""


def always(position: int) -> bool:
    """Return True: the policy is the step's own."""
    return True


class StoreClaim:
    """`rollout.claim=store`: claim as many slices as fit, of one ticket at a time."""

    def __init__(self, coordinator: Coordinator, may_begin: MayBegin = always) -> None:
        self._coordinator, self._may_begin = coordinator, may_begin
        self._reserved: deque[int] = deque()

    @property
    def waits_for(self) -> int | None:
        """Position of the claimed slice that must wait."""
        return self._coordinator.plan.slice(self._reserved[0])[0] if self._reserved else None

    def next(self, room: int) -> list[GroupSlice]:
        """See `SliceClaim`. A slice that may not start yet stays reserved."""
        coordinator, slices = self._coordinator, []
        plan = coordinator.plan
        while len(slices) < room:
            if not self._reserved:
                self._reserved.extend(coordinator.claim(min(room - len(slices), plan.slices)))
            position, claimed = plan.slice(self._reserved[0])
            if not coordinator.may_start(position) or not self._may_begin(position):
                break
            self._reserved.popleft()
            if claimed not in plan.carried:
                slices.append(claimed)
        return slices

    def ahead(self, room: int) -> list[GroupSlice]:
        """See `SliceClaim`."""
        return self.next(room)


class StaticClaim:
    """`rollout.claim=static`, for `rollout.accept=in_order`: slice i belongs to replica i mod n.

    The first wave has the goal and the extra tickets. If the goal is not reached when all of a wave are resolved, the
    next wave has as many as are missing.
    """

    def __init__(self, coordinator: FirstKInOrder, replica: int, replicas: int, may_begin: MayBegin = always) -> None:
        self._coordinator, self._replicas, self._may_begin = coordinator, replicas, may_begin
        self._next, self._wave_end = replica, coordinator.plan.initial_limit

    def ahead(self, room: int) -> list[GroupSlice]:
        """Return the first wave only: a later wave's replicas must not depend on when verdicts came."""
        return self._dealt()

    def next(self, room: int) -> list[GroupSlice]:
        """Return a whole wave, regardless of `room`: the engine queues it in order."""
        plan = self._coordinator.plan
        # Position 0: none starts before the policy is new enough for the step.
        while self._may_begin(0):
            slices = self._dealt()
            if slices or self._wave_end == plan.limit:
                return slices
            qualifying = self._coordinator.qualifying(self._wave_end)
            if qualifying is None or qualifying >= plan.goal:
                return slices
            self._wave_end = min(plan.limit, self._wave_end + plan.goal - qualifying)
        return []

    def _dealt(self) -> list[GroupSlice]:
        plan, slices = self._coordinator.plan, []
        while self._next < self._wave_end * plan.slices:
            slices.append(plan.slice(self._next)[1])
            self._next += self._replicas
        return [dealt for dealt in slices if dealt not in plan.carried]


def claims(
    name: str, coordinator: Coordinator, replica: int, replicas: int, may_begin: MayBegin = always
) -> SliceClaim:
    """Return the claim that `rollout.claim` names, for replica number `replica` of `replicas`."""
    if name == "store":
        return StoreClaim(coordinator, may_begin)
    assert isinstance(coordinator, FirstKInOrder), "claim: static needs accept: in_order"
    return StaticClaim(coordinator, replica, replicas, may_begin)
