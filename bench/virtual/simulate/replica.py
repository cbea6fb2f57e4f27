"""One replica on a virtual clock: the loop of `rollout.Rollouts`, from event to event instead of step by step."""

from collections import deque
from math import ceil, inf

from bench.virtual.simulate.engine import VirtualEngine
from bench.virtual.simulate.scene import Scene
from bench.virtual.simulate.store import CountingStore
from spmd_rl.rollout.claims import SliceClaim, StaticClaim, StoreClaim
from spmd_rl.rollout.coordinator import Coordinator
from spmd_rl.rollout.engine_loop import IDLE_SECONDS
from spmd_rl.rollout.step_plan import GroupSlice

STORE_SECONDS = 1e-4
"""A store operation; so much later another replica may have claimed the next ticket."""


class Replica:
    """Between two events it only looks at the store; looks that could see nothing new are counted, not made."""

    def __init__(self, scene: Scene, store: CountingStore) -> None:
        self.engine = VirtualEngine(scene.speed, scene.max_running)
        self.running: dict[GroupSlice, int] = {}
        """slices under way -> answers that have not ended"""
        self.finished: list[GroupSlice] = []
        """slices whose verdicts are in, as they came"""
        self.look = self.ended_at = 0.0
        """when it has to look at the store next; when it knew the step's end"""
        self.scene, self._store = scene, store
        self.verdicts: deque[tuple[float, GroupSlice]] = deque()
        """when each verdict arrives"""
        self.carried: dict[tuple[GroupSlice, int], float] = {}
        """tokens so far of each request that goes on in the next step"""
        self.begun: dict[GroupSlice, int] = {}
        """the step, or version, that began each slice"""
        self.begun_in = 0
        """the step, or version, that begins slices now"""
        self._looked = 0.0

    def begin(self, now: float, step: int, coordinator: Coordinator, claim: SliceClaim, slots: int) -> None:
        """A step begins. What was carried goes on."""
        self.begun_in, self._coordinator, self._claim, self._slots = step, coordinator, claim, slots
        self._looked = self.look = now
        self.engine.advance(now)
        for request, num_tokens in self.carried.items():
            self.engine.add(request, num_tokens)
        for group_slice in self.finished:
            self._report(group_slice)

    @property
    def due(self) -> float:
        """When it has something to do."""
        return min(self.engine.next_end(), self.look, self.verdicts[0][0] if self.verdicts else inf)

    @property
    def interval(self) -> float:
        """Seconds between two looks at the store: those of a turn, or a share of all replicas' looks."""
        turn = self.engine.step_seconds if self.engine.num_requests else IDLE_SECONDS
        return max(self._coordinator.pause, turn) + 1e-6  # a rounding error must not put it before the pause is over

    @property
    def waits_for(self) -> int | None:
        """The position that must be allowed before it can start what it has reserved."""
        return self._claim.waits_for if isinstance(self._claim, StoreClaim) else None

    def look_after(self, event: float) -> None:
        """Look as soon as it would have seen what another replica has just written."""
        missed = max(0, ceil((event - self._looked) / self.interval) - 1)
        self.look = min(self.look, self._looked + (missed + 1) * self.interval)

    def turn(self, now: float) -> bool:
        """All that happens now. Whether this replica knows that the step has ended."""
        for group_slice, _ in self.engine.advance(now):
            self.running[group_slice] -= 1
            if self.running[group_slice] == 0:
                self.verdicts.append((now + self.scene.verdict_seconds, group_slice))
        news = self.look <= now
        while self.verdicts and self.verdicts[0][0] <= now:
            news = True
            _, group_slice = self.verdicts.popleft()
            del self.running[group_slice]
            self.finished.append(group_slice)
            self._report(group_slice)
        if not news and (self.waits_for is not None or isinstance(self._claim, StaticClaim)):
            return False  # an answer has ended, which others do not see and which lets nothing start here
        self.look = inf
        if self._ended(now):
            self.ended_at = now
            return True
        self._start(now)
        return False

    def num_stale(self, trained: set[int], step: int) -> int:
        """Answers to these tickets that were begun before the step."""
        slices = [
            group_slice
            for group_slice in self.finished
            if group_slice.ticket in trained and self.begun[group_slice] < step
        ]
        return sum(len(self.scene.answers(group_slice)) for group_slice in slices)

    def close(self, used: set[int]) -> list[GroupSlice]:
        """The step has ended: what it did not use is aborted or, if the settings say so, carried; what is carried."""
        self.carried = self.engine.stop()
        assert not any(group_slice.ticket in used for group_slice in self.running), "a used ticket is still under way"
        if not self.scene.settings.partial_rollout:
            for under_way in (self.carried, self.verdicts, self.running, self.finished):
                under_way.clear()
        self.finished = [group_slice for group_slice in self.finished if group_slice.ticket not in used]
        carried = [*self.running, *self.finished]
        self.begun = {group_slice: self.begun[group_slice] for group_slice in carried}
        return carried

    def _start(self, now: float) -> None:
        room = (self._slots - self.engine.num_requests) // self.scene.settings.slice_size
        slices = self._claim.next(min(room, self._coordinator.plan.slices))
        for group_slice in slices:
            answers = self.scene.answers(group_slice)
            self.running[group_slice], self.begun[group_slice] = len(answers), self.begun_in
            for answer, num_tokens in answers.items():
                self.engine.add((group_slice, answer), num_tokens)
        if slices:
            self.look = now + STORE_SECONDS  # for more

    def _report(self, group_slice: GroupSlice) -> None:
        position = self._coordinator.plan.cursor.position(group_slice.ticket)
        if self._coordinator.merge_slices(position, group_slice.number, b"") is not None:
            self._coordinator.resolve(position, self.scene.qualifies(group_slice.ticket))

    def _ended(self, now: float) -> bool:
        before = self._store.looks
        ended = self._coordinator.ended()
        if self._store.looks > before:
            self._store.looks += max(0, ceil((now - self._looked) / self.interval) - 1)
            self._looked = now
        return ended
