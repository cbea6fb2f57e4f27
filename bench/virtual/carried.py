"""Generators that never stop at a step's end: split placement with carried answers, and ranks that are lent.

A step ends at the K-th qualifying ticket in order; what runs of the extra ones goes on in the next step. The ticket at
position p of step n will be trained on at step n + p // K, and starts only with a version that is young enough for it.
New weights come in the middle of answers, which wait while they are fetched. Ranks that are lent train, and generate
from their publish of version n - 1 until the tickets of step n are in; others go on with what they then run.

When a version is published follows from the steps before it, so that steps are played one after the other.
Left out: the probe, and what is computed again for an answer that changes its weights or its rank.
"""

from collections import deque
from dataclasses import replace
from heapq import heapify, heapreplace
from math import inf

from bench.virtual.simulate.cluster import Cluster, VirtualStep
from bench.virtual.simulate.replica import Replica
from bench.virtual.simulate.scene import Scene
from bench.virtual.two_sides import Costs, Generation, Run
from spmd_rl.rollout.claims import claims
from spmd_rl.rollout.coordinator import FirstKInOrder
from spmd_rl.rollout.pace import last_use, oldest_version
from spmd_rl.rollout.step_plan import GroupSlice, StepPlan, num_slots


class Paced(FirstKInOrder):
    """The coordinator of a replica that starts nothing which its version is too old for."""

    step = version = max_staleness = 0
    """The step, the replica's version, and `placement.max_staleness`."""

    def is_young(self, position: int) -> bool:
        """Whether the version may begin this ticket."""
        return self.version >= oldest_version(last_use(self.step, position, 0, self.plan.goal), self.max_staleness)

    def may_start(self, position: int) -> bool:
        """See `Coordinator`."""
        return self.is_young(position) and super().may_start(position)


class CarriedReplica(Replica):
    """A replica that takes new weights in the middle of its answers."""

    def adopt(self, version: int, now: float, seconds: float) -> None:
        """What starts from now on counts as begun in `version`; the engine stands still for so many seconds."""
        self.begun_in = version
        self.engine.pause(now, seconds)
        self.look_after(now)

    def oldest(self, trained: set[int]) -> float:
        """The first step, or version, that began an answer to these tickets here; `inf` if none did."""
        return min((self.begun[s] for s in self.finished if s.ticket in trained), default=inf)

    @property
    def under_way(self) -> list[GroupSlice]:
        """What it carries on, finished slices included."""
        return [*self.running, *self.finished]

    @property
    def num_carried(self) -> int:
        """Requests that it goes on with."""
        return len(self.carried)

    def hand_over(self, group_slice: GroupSlice, other: "CarriedReplica") -> None:
        """Let another replica go on with a slice that is carried, with the tokens that it has."""
        other.begun[group_slice] = self.begun.pop(group_slice)
        if group_slice not in self.running:
            self.finished.remove(group_slice)
            other.finished.append(group_slice)
            return
        other.running[group_slice] = self.running.pop(group_slice)
        for request in [request for request in self.carried if request[0] == group_slice]:
            other.carried[request] = self.carried.pop(request)
        for verdict in [verdict for verdict in self.verdicts if verdict[1] == group_slice]:
            self.verdicts.remove(verdict)
            other.verdicts = deque(sorted([*other.verdicts, verdict]))


class CarriedCluster(Cluster):
    """The replicas of `scene`, of which the last `num_lent` train too. All begin with the same version."""

    def __init__(self, scene: Scene, num_lent: int, max_staleness: int, version: int, now: float) -> None:
        super().__init__(scene, CarriedReplica)
        self.now = self.joins = now
        """joins: when the ranks that are lent have published the version before the next step's."""
        self.pending: list[tuple[float, int, float]] = []
        """(when, version, seconds to fetch it) of what is announced later."""
        self.oldest = version
        """That began an answer which the last step trained on."""
        self.left_at = now
        """When the tickets of the last step were in, and lent ranks knew it."""
        self._num_dedicated, self._version, self.max_staleness = scene.replicas - num_lent, version, max_staleness
        self._paced: list[Paced] = []

    def busy(self) -> tuple[float, float]:
        """Return seconds x replicas in which the engines of dedicated and of lent ranks have computed."""
        seconds, cut = [replica.engine.busy for replica in self.replicas], self._num_dedicated
        return sum(seconds[:cut]), sum(seconds[cut:])

    def step(self, number: int) -> VirtualStep:
        """See `Cluster`."""
        step = super().step(number)
        dedicated, lent = self.replicas[: self._num_dedicated], self.replicas[self._num_dedicated :]
        loads = [(replica.num_carried, index) for index, replica in enumerate(dedicated)]
        heapify(loads)
        for replica in lent:
            for group_slice in replica.under_way:
                index = loads[0][1]
                replica.hand_over(group_slice, dedicated[index])
                heapreplace(loads, (dedicated[index].num_carried, index))
        return step

    def _begin(self, name: str, number: int, plan: StepPlan) -> list[Paced]:
        scene, settings, size = self.scene, self.scene.settings, len(self.replicas)
        self._paced = [Paced(self.store, name, plan, size, lambda: self.now) for _ in range(size)]
        slots = num_slots(settings, self._num_dedicated, scene.max_running)
        for index, (replica, paced) in enumerate(zip(self.replicas, self._paced, strict=True)):
            lent = index >= self._num_dedicated
            version = number - 1 if lent else self._version
            paced.step, paced.version, paced.max_staleness = number, version, self.max_staleness
            claim = claims("store", paced, index, size)
            replica.begin(max(self.now, self.joins) if lent else self.now, version, paced, claim, slots)
        return self._paced

    def _close(self, trained: set[int], number: int) -> int:
        self.oldest = min((replica.oldest(trained) for replica in self.replicas), default=number - 1)
        return sum(replica.num_stale(trained, number - 1) for replica in self.replicas)

    def _ended_at(self) -> float:
        ends = [replica.ended_at for replica in self.replicas]
        self.left_at = max(ends)
        return max(ends[: self._num_dedicated])

    def _may_start(self, index: int, position: int) -> bool:
        return self._paced[index].is_young(position)

    def _happens(self, until: float) -> float | None:
        """Dedicated replicas take the next version, if it is announced before a moment."""
        if not self.pending or self.pending[0][0] > until:
            return None
        when, self._version, seconds = self.pending.pop(0)
        when = max(when, self.now)
        for replica, paced in list(zip(self.replicas, self._paced, strict=True))[: self._num_dedicated]:
            replica.adopt(self._version, when, seconds)
            paced.version = self._version
        return when


class Carried(Run):
    """A run of `num_ranks` ranks, of which the replicas of `generation` only generate."""

    def __init__(
        self, generation: Generation, costs: Costs, num_ranks: int, max_staleness: int, lends: bool = False
    ) -> None:
        """lends: whether the ranks that train generate too."""
        super().__init__(generation, costs, num_ranks)
        self.max_staleness = max_staleness
        self.num_train = num_ranks - generation.scene.replicas
        self._num_lent = self.num_train if lends else 0
        assert self.num_train > 0 and generation.scene.replicas > 0, "both sides need a rank"

    def _live(self, last: int, dies: float) -> bool:
        """See `Run`."""
        costs, scene = self.costs, self.generation.scene
        published = self.since = self.clock.now + costs.stage
        whole = replace(scene, replicas=scene.replicas + self._num_lent)
        cluster = CarriedCluster(whole, self._num_lent, self.max_staleness, self.start, published + costs.fetch)
        cluster.cursor = self.saved
        seconds, before = costs.train * self.num_ranks / self.num_train, (0.0, 0.0)
        for step in range(self.start + 1, last + 1):
            generated = cluster.step(step)
            slow = costs.slowness(step)
            trained = max(cluster.left_at, published) + seconds
            published = max(trained + costs.stage * slow, published + costs.fetch)
            if published > dies:
                self.clock.now = dies
                return False
            busy = cluster.busy()
            self.busy += busy[0] - before[0]
            self.trained_seconds += seconds + (busy[1] - before[1]) / self.num_train
            self.clock.now, cluster.joins, before = published, published, busy
            cluster.pending.append((published, step, costs.fetch * slow))
            self.count(step, min(cluster.oldest, step - 1), generated, cluster.cursor)
        return True


def carried_scene(scene: Scene, max_staleness: int) -> Scene:
    """Return the scene with as many extra tickets as the staleness lets start."""
    k = scene.settings.prompts_per_step
    extra = max_staleness * k
    settings = replace(
        scene.settings,
        over_sample=extra,
        max_prompts_per_step=4 * k + extra,
        partial_rollout=True,
        accept="in_order",
        tail="none",
    )
    return replace(scene, settings=settings)
