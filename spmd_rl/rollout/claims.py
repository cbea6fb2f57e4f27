"""How a replica gets the slices that it starts: `rollout.claim`.

store    from one atomic counter as slots free up, so that the fast replica does more; nobody assigns
static   dealt round-robin in waves, so that what an engine computes together never depends on time
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from spmd_rl.rollout.coordinator import Coordinator, FirstKInOrder
from spmd_rl.rollout.step_plan import GroupSlice


class SliceClaim(Protocol):
    """How a replica gets its next slices."""

    def next(self, room: int) -> list[GroupSlice]:
        """Return the slices to start now, in order; none if there are none for this replica yet.

        `room`: the number of slices that fit.
        """
        ...

    def ahead(self, room: int) -> list[GroupSlice]:
        """As `next`, for a step that starts with an older policy than it could have: see `Rollouts.start_ahead`."""
        ...


MayBegin = Callable[[int], bool]
"""Whether this replica's policy is new enough for the ticket at a position of the step."""


def always(position: int) -> bool:
    """Return true: the policy is the one that the step is for."""
    return True


class StoreClaim:
    """`rollout.claim=store`: a replica claims as many slices as fit, at most one ticket's at a time.

    Where there is room, the answers of one prompt so meet in one prefix cache.
    """

    def __init__(self, coordinator: Coordinator, may_begin: MayBegin = always) -> None:
        self._coordinator, self._may_begin = coordinator, may_begin
        self._reserved: deque[int] = deque()

    @property
    def waits_for(self) -> int | None:
        """The position of the slice that is claimed here and may not start yet."""
        return self._coordinator.plan.slice(self._reserved[0])[0] if self._reserved else None

    def next(self, room: int) -> list[GroupSlice]:
        """See `SliceClaim`. A slice that may not start yet stays claimed here."""
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
    """`rollout.claim=static`, for `rollout.accept=in_order`: slice i is replica i mod n's.

    The first wave has the goal and the extra tickets; when all of a wave are resolved and the goal is not reached, the
    next has as many as are missing.
    """

    def __init__(self, coordinator: FirstKInOrder, replica: int, replicas: int, may_begin: MayBegin = always) -> None:
        self._coordinator, self._replicas, self._may_begin = coordinator, replicas, may_begin
        self._next, self._wave_end = replica, coordinator.plan.initial_limit

    def ahead(self, room: int) -> list[GroupSlice]:
        """See `SliceClaim`. The first wave: who answers a later one must not depend on how soon verdicts came."""
        return self._dealt()

    def next(self, room: int) -> list[GroupSlice]:
        """See `SliceClaim`. A whole wave starts at once, whatever `room` says: the engine queues it in order."""
        plan = self._coordinator.plan
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
        """This replica's slices of the wave, each once."""
        plan, slices = self._coordinator.plan, []
        while self._next < self._wave_end * plan.slices:
            slices.append(plan.slice(self._next)[1])
            self._next += self._replicas
        return [dealt for dealt in slices if dealt not in plan.carried]


def claims(
    name: str, coordinator: Coordinator, replica: int, replicas: int, may_begin: MayBegin = always
) -> SliceClaim:
    """Return the claim called `name` in `rollout.claim`, for replica number `replica` of `replicas`."""
    if name == "store":
        return StoreClaim(coordinator, may_begin)
    assert isinstance(coordinator, FirstKInOrder), "claim: static needs accept: in_order"
    return StaticClaim(coordinator, replica, replicas, may_begin)
