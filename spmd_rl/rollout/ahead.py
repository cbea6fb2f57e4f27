"""`StepsAhead`: steps of replicas that generate ahead of training, without a collective at each step's end.

The store holds each step's end and tickets. Each replica writes there which slices it carries on. The next step begins
once all have written; `placement.max_staleness` limits the age of the policy that starts a ticket.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from spmd_rl.config.sections.rollout import RolloutConfig
from spmd_rl.rollout.claims import SliceClaim, claims
from spmd_rl.rollout.coordinator import Coordinator, Store, coordinate
from spmd_rl.rollout.pace import last_use, oldest_version
from spmd_rl.rollout.step_plan import Cursor, GroupSlice, plan_step

_slices = msgspec.msgpack.Decoder(list[GroupSlice]).decode


class Replicas(NamedTuple):
    """Replicas of a job as one rank sees them."""

    mine: int
    """This rank's replica; on a rank without an engine, the next rank's with one."""
    count: int
    keepers: Mapping[int, int]
    """First rank of each replica that is never lent, by replica: they finish open slices."""


class StepsAhead:
    """The current step and the cursor of unused tickets."""

    def __init__(
        self,
        store: Store,
        settings: RolloutConfig,
        max_staleness: int,
        replicas: Replicas,
        priority_of: Callable[[int], float],
    ) -> None:
        self.cursor, self.number, self.start = Cursor(), 0, 0
        self.replicas = replicas
        self.given: dict[GroupSlice, int] = {}
        """Slices that others left at the previous step's end, and the first rank of the replica that takes each."""
        self.coordinator: Coordinator
        self._store, self._settings, self._max_staleness = store, settings, max_staleness
        self._priority_of, self._name = priority_of, replicas.mine

    def begin(self, first: int, start: int, cursor: Cursor) -> None:
        """Begin with step `first`; start: version from which the run resumed."""
        self.start = start
        self._open(first, cursor, ())

    def _open(self, number: int, cursor: Cursor, carried: Sequence[GroupSlice]) -> None:
        self.number, self.cursor = number, cursor
        plan = plan_step(cursor, self._settings, carried, self._priority_of)
        self.coordinator = coordinate(self._store, f"step{number}", plan, self.replicas.count)

    @property
    def oldest(self) -> int:
        """Oldest policy version that may generate for this step."""
        return oldest_version(self.number, self._max_staleness, self.start)

    def claim(self, version: Callable[[], int]) -> SliceClaim:
        """Return the claim of this replica. version: returns its policy's current version."""
        coordinator, settings = self.coordinator, self._settings
        number, plan = self.number, coordinator.plan

        def may_begin(position: int) -> bool:
            last = number
            if settings.partial_rollout:
                # within the initial positions, those that are claimed first need not be the first ones
                rejected = 0 if position < plan.initial_limit else coordinator.num_rejected
                last = last_use(number, position, rejected, plan.goal)
            return version() >= oldest_version(last, self._max_staleness, self.start)

        return claims(settings.claim, coordinator, self.replicas.mine, self.replicas.count, may_begin)

    def join(self) -> None:
        """Take part in the open step, and only until its end."""
        self._name = self.replicas.count + self.coordinator.join()

    def leave(self, slices: Sequence[GroupSlice]) -> None:
        """Publish the slices that this replica carries on or hands over."""
        self.coordinator.leave(self._name, msgspec.msgpack.encode(slices))

    def advance(self) -> bool:
        """Go on to the next step; False while a replica that may have open slices has not left this one."""
        count, keepers = self.replicas.count, self.replicas.keepers
        left = self.coordinator.left([*keepers, *range(count, count + self.coordinator.num_joined)])
        if left is None:
            return False
        # Lists of replicas that are never lent come first. A slice of a lent one goes to the one with the fewest.
        slices = list(map(_slices, left))
        kept, others = slices[: len(keepers)], sorted(chain(*slices[len(keepers) :]))
        held, ranks = list(map(len, kept)), list(keepers.values())
        self.given = {}
        for one in others:
            place = held.index(min(held))
            self.given[one] = ranks[place]
            held[place] += 1
        carried = [*chain(*kept), *others]
        self._open(self.number + 1, self.cursor.after(self.coordinator.used_tickets()), carried)
        return True
