"""What `placement.mode=split` is worth against a colocated run on as many ranks: steps an hour, idle shares, lags."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bench.virtual.carried import Carried, carried_scene
from bench.virtual.simulate.policies import POLICIES
from bench.virtual.simulate.scene import Scene
from bench.virtual.two_sides import Colocated, Costs, Generation, Run, Split, generation_on
from spmd_rl.rollout.step_plan import Cursor

SYNCHRONOUS = [name for name, settings in POLICIES.items() if not settings.get("partial_rollout")]
"""Policies whose steps carry nothing on: all that split placement takes."""

SETTLED = 5
"""Steps after which both sides are under way; what comes before is not measured."""

SETTLED_CARRIED = 30
"""The same with carried answers: generation gets ahead by a little more in each step, until the bound stops it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One placement under one policy."""

    policy: str
    replicas: int
    """All ranks, one GPU each."""
    num_train: int
    """Ranks that train; all of them where placement is colocated."""
    max_staleness: int | None
    """None: colocated."""
    steps_per_hour: float
    train_idle: float
    """Share of the time in which the ranks that train compute no update; colocated, in which no rank does anything."""
    generate_idle: float
    """Share of the time in which the engines of the ranks that generate compute nothing; colocated, as `train_idle`."""
    lags: Mapping[int, float]
    """Lag, in versions -> share of the steps."""
    lives: int
    """How often the job began."""
    goodput: float
    """ETTR, see `track.goodput`: 1 less the shares of restarts and of what was done again."""
    mode: str = "split"

    @property
    def name(self) -> str:
        """What it is called in a table."""
        return "colocated" if self.max_staleness is None else f"{self.mode}, staleness {self.max_staleness}"


@dataclass(slots=True)
class Comparison:
    """Runs of one scene under one policy; what a number of replicas generates is played once for all of them."""

    scene: Scene
    policy: str
    num_steps: int
    """Measured, at least; `tail: defer` goes on to its next long round."""
    _generations: dict[int, Generation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = replace(self.scene.settings, **POLICIES[self.policy])
        self.scene = replace(self.scene, settings=settings)

    def colocated(self, costs: Costs) -> Outcome:
        """Return the run in which every rank does both."""
        return self._outcome(Colocated(self._generation(self.scene.replicas), costs, self.scene.replicas), None)

    def split(self, costs: Costs, num_train: int, max_staleness: int) -> Outcome:
        """Return the run in which so many ranks train and the others generate."""
        generation = self._generation(self.scene.replicas - num_train)
        return self._outcome(Split(generation, costs, self.scene.replicas, max_staleness), max_staleness)

    def best_split(self, costs: Costs, shares: Iterable[float], max_staleness: int) -> Outcome:
        """Return the fastest of the runs in which such a share of the ranks trains; of equals the first."""
        counts = dict.fromkeys(min(self.scene.replicas - 1, max(1, round(x * self.scene.replicas))) for x in shares)
        outcomes = [self.split(costs, num_train, max_staleness) for num_train in counts]
        return max(outcomes, key=lambda outcome: outcome.steps_per_hour)

    def carried(self, costs: Costs, num_train: int, max_staleness: int, lends: bool = False) -> Outcome:
        """Return the run in which generators go on over the ends of steps, helped by the others if `lends`."""
        generation = generation_on(carried_scene(self.scene, max_staleness), self.scene.replicas - num_train)
        run = Carried(generation, costs, self.scene.replicas, max_staleness, lends)
        told = self._told(run, max_staleness, SETTLED_CARRIED, SETTLED_CARRIED + self.num_steps)
        return replace(told, mode="lent, carried" if lends else "split, carried", policy="in order")

    def best_carried(self, costs: Costs, shares: Iterable[float], max_staleness: int, lends: bool = False) -> Outcome:
        """Return the fastest of those runs in which such a share of the ranks trains."""
        counts = dict.fromkeys(min(self.scene.replicas - 1, max(1, round(x * self.scene.replicas))) for x in shares)
        return max(
            (self.carried(costs, num_train, max_staleness, lends) for num_train in counts),
            key=lambda outcome: outcome.steps_per_hour,
        )

    def _generation(self, replicas: int) -> Generation:
        return self._generations.setdefault(replicas, generation_on(self.scene, replicas))

    def _outcome(self, run: Run, max_staleness: int | None) -> Outcome:
        return self._told(run, max_staleness, *self._measured(run.generation))

    def _told(self, run: Run, max_staleness: int | None, first: int, last: int) -> Outcome:
        """What a run came to between the ends of two steps."""
        steps = run.steps(last)
        begin, end = run.reached[first], steps[-1]
        seconds, trained = end.at - begin.at, end.trained_seconds - begin.trained_seconds
        replicas, num_ranks = run.generation.scene.replicas, self.scene.replicas
        generated = (end.busy - begin.busy) / replicas
        train_idle, generate_idle = 1 - trained / seconds, 1 - generated / seconds
        if max_staleness is None:
            train_idle = generate_idle = 1 - (trained + generated) / seconds
        lags = Counter(step.lag for step in steps[first:])
        return Outcome(
            policy=self.policy,
            replicas=num_ranks,
            num_train=num_ranks if max_staleness is None else num_ranks - replicas,
            max_staleness=max_staleness,
            steps_per_hour=3600 * (last - first) / seconds,
            train_idle=train_idle,
            generate_idle=generate_idle,
            lags={lag: count / (last - first) for lag, count in sorted(lags.items())},
            lives=run.lives,
            goodput=run.goodput,
        )

    def _measured(self, generation: Generation) -> tuple[int, int]:
        """The steps between whose ends is measured: with both sides under way, and whole cycles of `tail: defer`."""
        defers, cursor, number, first = self.scene.settings.tail == "defer", Cursor(), 0, 0
        while True:
            step, cursor = generation.step(cursor)
            number += 1
            if step.long or not defers:
                if not first and number >= SETTLED:
                    first = number
                elif first and number >= first + self.num_steps:
                    return first, number
