"""A run of steps: replicas on virtual clocks around one store, ordered by what happens next."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from bench.virtual.simulate.replica import Replica
from bench.virtual.simulate.scene import Scene
from bench.virtual.simulate.store import CountingStore
from spmd_rl.rollout.claims import claims
from spmd_rl.rollout.coordinator import Coordinator, coordinate
from spmd_rl.rollout.step_plan import Cursor, GroupSlice, StepPlan, num_slots, plan_step


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """What one step did."""

    long: bool
    """It waited for every ticket that it needed."""
    seconds: float
    """of generation and scoring"""
    used: tuple[int, ...]
    """tickets that no later step will see"""
    trained: tuple[int, ...]
    """those of them that qualify"""
    num_stale: int
    """answers of these begun by an older policy"""
    bubble: float
    """mean idle share of the replicas"""
    tokens: float
    """computed, whether they are used or not"""
    operations: int
    """of the store, without looks"""
    looks: int


class Cluster:
    """A run under one policy. Its cursor, its tickets and what a step uses are the scheduler's own."""

    def __init__(self, scene: Scene, replica: type[Replica] = Replica) -> None:
        self.now = 0.0
        self.cursor = Cursor()
        """The tickets that the next step may use."""
        self.store = CountingStore()
        self.scene = scene
        self.replicas = [replica(scene, self.store) for _ in range(scene.replicas)]
        self.carried: frozenset[GroupSlice] = frozenset()
        """Slices that go on in the next step."""

    def steps(self) -> Iterator[VirtualStep]:
        """Steps without end."""
        for number in count(1):
            yield self.step(number)
            self.now += self.scene.train_seconds

    def step(self, number: int) -> VirtualStep:
        """Generation and scoring of the step of this number, on from `cursor`."""
        scene, replicas = self.scene, self.replicas
        plan = plan_step(self.cursor, scene.settings, self.carried)
        name, began, before = f"step{number}", self.now, self._counters()
        coordinators = self._begin(name, number, plan)
        self._play(plan, f"{name}/rejected")
        used = set(coordinators[0].used_tickets())
        trained = {ticket for ticket in used if scene.qualifies(ticket)}
        num_stale = self._close(trained, number)
        self.carried = frozenset(group_slice for replica in replicas for group_slice in replica.close(used))
        self.cursor = self.cursor.after(used)
        for index, coordinator in enumerate(coordinators):
            coordinator.forget(shared=index == 0)
        busy, tokens, operations, looks = (b - a for a, b in zip(before, self._counters(), strict=True))
        seconds = self.now - began
        idle = 1 - busy / seconds / len(replicas) if seconds else 0.0
        step = (plan.waits_for_stragglers, seconds, tuple(sorted(used)), tuple(sorted(trained)), num_stale, idle)
        return VirtualStep(*step, tokens, operations, looks)

    def _begin(self, name: str, number: int, plan: StepPlan) -> Sequence[Coordinator]:
        """All replicas begin a step; their coordinators."""
        scene, size = self.scene, len(self.replicas)
        slots = num_slots(scene.settings, size, scene.max_running)
        coordinators = [coordinate(self.store, name, plan, size, lambda: self.now) for _ in self.replicas]
        for index, (replica, coordinator) in enumerate(zip(self.replicas, coordinators, strict=True)):
            claim = claims(scene.settings.claim, coordinator, index, size)
            replica.begin(self.now, number, coordinator, claim, slots)
        return coordinators

    def _close(self, trained: set[int], number: int) -> int:
        """How many answers of the tickets that train an older policy began."""
        return sum(replica.num_stale(trained, number) for replica in self.replicas)

    def _ended_at(self) -> float:
        """When the last replica knew of the step's end."""
        return max(replica.ended_at for replica in self.replicas)

    def _happens(self, until: float) -> float | None:
        """What comes from outside of the replicas before a moment, one at a time: when it did."""
        return None

    def _may_start(self, index: int, position: int) -> bool:
        """Whether nothing but the round's limits keeps a replica from starting this position."""
        return True

    def _counters(self) -> tuple[float, float, int, int]:
        engines = [replica.engine for replica in self.replicas]
        computed = sum(engine.busy for engine in engines), sum(engine.tokens for engine in engines)
        return *computed, self.store.operations, self.store.looks

    def _play(self, plan: StepPlan, rejected: str) -> None:
        """From event to event, until every replica knows that the step has ended."""
        replicas, over, stuck = self.replicas, False, 0
        agenda = Agenda(replicas)
        waiting: list[tuple[int, int]] = []
        while agenda.live:
            time, index = agenda.next()
            if (event := self._happens(time)) is not None:
                self.now = event
                if index >= 0:
                    agenda.plan(index)
                agenda.look(agenda.live, event)
                continue
            if time == inf:  # nothing runs: they find out, each in its time, what may start now
                stuck += 1
                assert stuck < 9, "no replica knows how the step goes on"
                agenda.look(agenda.live, self.now)
                continue
            self.now = time
            if replicas[index].turn(time):
                agenda.drop(index)
                if not over:
                    over = True
                    agenda.look(agenda.live, time)
                continue
            allowed = min(plan.limit, plan.initial_limit + int(self.store.peek(rejected)))
            position = replicas[index].waits_for
            if over or (position is not None and position < allowed and self._may_start(index, position)):
                replicas[index].look_after(time)
            elif position is not None and position >= allowed:
                heappush(waiting, (position, index))
            if replicas[index].running:
                stuck = 0
            agenda.plan(index)
            while waiting and waiting[0][0] < allowed:
                agenda.look([heappop(waiting)[1]], time)
        self.now = self._ended_at()


class Agenda:
    """Which replica has something to do next."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.live = set(range(len(replicas)))
        """those that do not know of the step's end yet"""
        self.replicas = replicas
        self._due = [replica.due for replica in replicas]
        self._heap = [(time, index) for index, time in enumerate(self._due)]
        heapify(self._heap)

    def next(self) -> tuple[float, int]:
        """(when, which replica); `inf` if none has."""
        while self._heap:
            time, index = heappop(self._heap)
            if index in self.live and time == self._due[index]:
                self._due[index] = inf
                return time, index
        return inf, -1

    def plan(self, index: int) -> None:
        """The replica has changed."""
        due = self.replicas[index].due
        if due != self._due[index]:
            self._due[index] = due
            heappush(self._heap, (due, index))

    def look(self, indices: Iterable[int], event: float) -> None:
        """Replicas that see at their next look what was written at `event`."""
        for index in indices:
            if index in self.live:
                self.replicas[index].look_after(event)
                self.plan(index)

    def drop(self, index: int) -> None:
        """The replica has nothing more to do in this step."""
        self.live.remove(index)
