"""A run with `placement.mode=split` on a virtual clock, and the colocated one that it is compared with.

Both generate with the scheduler's own code (`Cluster`); how far generation runs ahead is `rollout.pace`. The loops are
those of both sides: generating replicas load the newest version between two steps,
begin a step once they have one that is young enough, and meet at its end; training ranks take a step's groups in order,
and hold up a publish while an older version is fetched and, where it is probed, until it has been loaded and answers.

A rank that is lost ends the job, which starts again from its last checkpoint: what had been generated ahead is lost.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from bench.virtual.clock import Clock, Process
from bench.virtual.simulate.cluster import Cluster, VirtualStep
from bench.virtual.simulate.scene import Scene
from spmd_rl.base.errors import UserError
from spmd_rl.data.seeds import counter_seed
from spmd_rl.rollout.pace import oldest_version
from spmd_rl.rollout.step_plan import Cursor

MAX_LIVES = 10_000


def due(step: int, every: int) -> bool:
    """Return whether what happens every so many steps happens after `step`; 0: never."""
    return every > 0 and step % every == 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that everything but generation takes, and what goes wrong."""

    train: float = 60.0
    """Of a step, on all ranks; fewer ranks take longer in proportion."""
    stage: float = 0.0
    """From the end of an update until its version can be fetched; training waits."""
    fetch: float = 0.0
    """From the look at an announcement until the engines hold the version; they generate nothing meanwhile."""
    probe_every: int = 1
    """See `publish.probe_every`."""
    slow_share: float = 0.0
    """Of the publishes, which take `slow_factor` times as long to stage and to fetch."""
    slow_factor: float = 10.0
    failure_seconds: float = inf
    """Between two losses of a rank, of all ranks, on average (exponential)."""
    restart_seconds: float = 300.0
    """From a loss until the job has begun again."""
    checkpoint_every: int = 10
    """Steps."""
    seed: int = 0
    """Of what goes wrong."""

    def slowness(self, version: int) -> float:
        """Return by how much the publish of a version takes longer."""
        return self.slow_factor if self._uniform("slow", version) < self.slow_share else 1.0

    def until_failure(self, life: int) -> float:
        """Return the seconds until this life of the job ends."""
        return (
            inf if math.isinf(self.failure_seconds) else -self.failure_seconds * math.log(self._uniform("life", life))
        )

    def _uniform(self, kind: str, number: int) -> float:
        return ((counter_seed(self.seed, kind, number) >> 12) + 0.5) / 2**52


@dataclass(slots=True)
class Generation:
    """The steps that some replicas generate. What a step takes is a function of its tickets: each is played once."""

    scene: Scene
    _played: dict[Cursor, tuple[VirtualStep, Cursor]] = field(default_factory=dict)

    def step(self, cursor: Cursor) -> tuple[VirtualStep, Cursor]:
        """Return the step that begins with this cursor, and the cursor after it."""
        if cursor not in self._played:
            cluster = Cluster(self.scene)
            cluster.cursor = cursor
            self._played[cursor] = cluster.step(1), cluster.cursor
        return self._played[cursor]


@dataclass(frozen=True, slots=True)
class Trained:
    """A step that has been trained on, and counts."""

    number: int
    version: int
    """That generated all of it."""
    generated: VirtualStep
    at: float
    """When its version had been published, in seconds since the run began."""
    trained_seconds: float
    """In which the ranks that train have computed updates, up to then, all that was lost included."""
    busy: float
    """Seconds x replicas in which engines have computed, up to then."""
    seconds: float
    """From the end of the step before it in the same life of the job, or from when this life came to its first step."""

    @property
    def lag(self) -> int:
        """Versions between the policy that generated it and the one that was trained."""
        return self.number - 1 - self.version


class Run:
    """One run; `steps` plays it."""

    def __init__(self, generation: Generation, costs: Costs, num_ranks: int) -> None:
        """num_ranks: all of them."""
        self.clock = Clock()
        self.lives = 0
        """How often the job has begun."""
        self.generation = generation
        self.reached: dict[int, Trained] = {}
        """Each step as it was trained on for the first time, whether it counts or has been lost since."""
        self.costs, self.num_ranks = costs, num_ranks
        self.trained_seconds = self.busy = 0.0
        self._steps: list[Trained] = []
        self.saved, self.start = Cursor(), 0
        """The last checkpoint."""
        self.since = 0.0
        """When the step before ended, or this life came to its first step."""

    @property
    def goodput(self) -> float:
        """Wall time of the steps that count over all wall time (ETTR), as `track.goodput` counts it."""
        return sum(step.seconds for step in self._steps) / self.clock.now

    def steps(self, last: int) -> list[Trained]:
        """Return the steps up to number `last`. UserError if ranks are lost too often to get there."""
        while len(self._steps) < last:
            self.lives += 1
            if self.lives > MAX_LIVES:
                raise UserError("--failure-hours: too few to get from one checkpoint to the next")
            del self._steps[self.start :]
            if self._live(last, self.clock.now + self.costs.until_failure(self.lives)):
                break
            self.clock.now += self.costs.restart_seconds
        return list(self._steps)

    def _live(self, last: int, dies: float) -> bool:
        """Play from the last checkpoint to step `last`, or until the job dies; whether it came to its end."""
        return self.clock.play(self.processes(last), dies)

    def processes(self, last: int) -> Iterator[Process]:
        """Yield what the job consists of, from the last checkpoint on."""
        raise NotImplementedError

    def count(self, step: int, version: int, generated: VirtualStep, cursor: Cursor) -> None:
        """A step has been trained on and its version published."""
        sums = self.clock.now, self.trained_seconds, self.busy, self.clock.now - self.since
        self.since = self.clock.now
        self._steps.append(Trained(step, version, generated, *sums))
        self.reached.setdefault(step, self._steps[-1])
        if due(step, self.costs.checkpoint_every):
            self.saved, self.start = cursor, step

    def _worked(self, generated: VirtualStep) -> None:
        self.busy += (1 - generated.bubble) * generated.seconds * self.generation.scene.replicas


class Colocated(Run):
    """Every rank generates, then every rank trains. Publishing takes nothing: it stays within the rank."""

    def processes(self, last: int) -> Iterator[Process]:
        """See `Run`."""
        yield self._loop(self.saved, self.start, last)

    def _loop(self, cursor: Cursor, start: int, last: int) -> Process:
        self.since = self.clock.now
        for step in range(start + 1, last + 1):
            generated, cursor = self.generation.step(cursor)
            yield generated.seconds
            self._worked(generated)
            yield self.costs.train
            self.trained_seconds += self.costs.train
            self.count(step, step - 1, generated, cursor)


class Split(Run):
    """Some ranks train while the replicas of `generation` generate."""

    def __init__(self, generation: Generation, costs: Costs, num_ranks: int, max_staleness: int) -> None:
        """See `Run`; max_staleness: of `placement`."""
        super().__init__(generation, costs, num_ranks)
        self.max_staleness = max_staleness
        self.num_train = num_ranks - generation.scene.replicas
        assert self.num_train > 0, "nobody trains"

    def processes(self, last: int) -> Iterator[Process]:
        """See `Run`."""
        self._newest = self._loaded = -1
        self._fetching: int | None = None
        self._delivered: dict[int, tuple[int, VirtualStep]] = {}
        yield self._train(self.saved, self.start, last)
        yield self._generate(self.saved, self.start, last)

    # -- the replicas, which meet at the end of every step

    def _generate(self, cursor: Cursor, start: int, last: int) -> Process:
        yield from self._follow(start)
        for step in range(start + 1, last + 1):
            yield from self._follow(oldest_version(step, self.max_staleness, start))
            generated, cursor = self.generation.step(cursor)
            yield generated.seconds
            self._worked(generated)
            self._delivered[step] = self._loaded, generated
        yield from self._follow(last)

    def _follow(self, at_least: int) -> Process:
        while True:
            yield lambda: self._newest > self._loaded or self._loaded >= at_least
            if (version := self._newest) > self._loaded:
                self._fetching = version
                yield self.costs.fetch * self.costs.slowness(version)
                self._fetching, self._loaded = None, version
            if self._loaded >= at_least:
                return

    # -- the ranks that train

    def _train(self, cursor: Cursor, start: int, last: int) -> Process:
        yield from self._publish(start, probed=True)
        self.since = self.clock.now
        seconds = self.costs.train * self.num_ranks / self.num_train
        for step in range(start + 1, last + 1):
            yield lambda step=step: step in self._delivered
            version, generated = self._delivered.pop(step)
            cursor = cursor.after(generated.used)
            yield seconds
            self.trained_seconds += seconds
            yield from self._publish(step, probed=due(step, self.costs.probe_every))
            self.count(step, version, generated, cursor)

    def _publish(self, version: int, probed: bool) -> Process:
        yield self.costs.stage * self.costs.slowness(version)
        yield lambda: self._fetching is None or self._fetching == self._newest
        self._newest = version
        if probed:
            yield lambda: self._loaded >= version


def generation_on(scene: Scene, replicas: int) -> Generation:
    """Return the steps of a scene as generated by so many replicas, whatever their number was before."""
    return Generation(replace(scene, replicas=replicas))
