"""The bound of `placement.max_staleness`: random histories of two sides with crashes, lost ranks and slow publishes.

No ticket is lost or used twice, no token is older than allowed, and versions only rise: of the rules on virtual clocks,
over many replicas, and of `Generator` and `RemoteRollouts` themselves, played in one thread.
"""

import random
from contextlib import closing
from dataclasses import replace
from math import inf

import msgspec
import xxhash

from spmd_rl.config import RlvrConfig
from spmd_rl.config.schema import RolloutConfig
from spmd_rl.distributed import World, solo
from spmd_rl.rollout.step_plan import Cursor, plan_step
from spmd_rl.split import GenerateSide, Generator, PieceRules, RemoteRollouts, TrainSide, generator, remote_step
from spmd_rl.split.client import Task
from spmd_rl.split.messages import News, Reported, Stats
from spmd_rl.split.server import Checked
from spmd_rl.split.work_queue import WorkQueue
from spmd_rl.tools.simulate.engine import Speed
from spmd_rl.tools.simulate.lengths import Lengths, long_tail
from spmd_rl.tools.simulate.scene import Scene
from spmd_rl.types import Verdict
from spmd_rl.types.encoded import pack
from spmd_rl.weights import in_flight
from spmd_rl.weights.messages import Announcement, MemberId
from tests.bench.virtual.two_sides import Costs, Generation, Split, Trained
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, FakeTokenizer, make_rollouts

MODES = ({}, {"accept": "first_finished"}, {"tail": "defer"}, {"claim": "static"})


# -- the rules, on virtual clocks --------------------------------------------------------------------------------------


def history(seed: int) -> tuple[Split, int, int]:
    """A run, its staleness and its last step."""
    draw = random.Random(seed)
    goal, staleness = draw.randint(1, 3), draw.choice([0, 1, 1, 2, 3, 5])
    mode = {"accept": "in_order", "claim": "store", **draw.choice(MODES)}
    rollout = RolloutConfig(
        prompts_per_step=goal, answers_per_prompt=2, over_sample=draw.randint(1, 2), min_answers=1, **mode
    )
    if draw.random() < 0.3 and rollout.claim == "store":
        rollout = replace(rollout, answers_per_claim=1)
    lengths = Lengths(long_tail(10, draw.choice([0.2, 1.3]), 200), seed)
    qualify, replicas = draw.choice([1.0, 0.7]), draw.randint(1, 3)
    scene = Scene(rollout, lengths, replicas, Speed(0.1, 0.01), max_running=draw.choice([1, 4]), qualify=qualify)
    num_train = draw.randint(1, 3)
    costs = Costs(
        train=draw.choice([0.2, 2.0, 20.0]),
        stage=draw.choice([0.0, 1.0]),
        fetch=draw.choice([0.0, 1.0, 10.0]),
        probe_every=draw.choice([0, 1, 3]),
        slow_share=0.3,
        slow_factor=draw.choice([2.0, 20.0]),
        restart_seconds=1.0,
        checkpoint_every=draw.randint(1, 3),
        seed=seed,
    )
    num_ranks = replicas + num_train
    step = 10 + costs.train * num_ranks / num_train + costs.stage + costs.fetch  # about so long a step takes
    costs = replace(costs, failure_seconds=draw.choice([4 * step, 12 * step, inf]))
    return Split(Generation(scene), costs, num_ranks, staleness), staleness, draw.randint(3, 6)


def test_no_ticket_is_lost_and_no_token_is_too_old_on_virtual_clocks() -> None:
    lived, lags = [], set()
    for seed in range(500):
        run, staleness, last = history(seed)
        steps = run.steps(last)
        assert [step.number for step in steps] == list(range(1, last + 1))
        assert_tickets(steps, run.generation.scene.settings)
        assert_versions(steps, staleness)
        lived.append(run.lives)
        lags |= {step.lag for step in steps}
    assert max(lived) > 3 and lived.count(1) > 50, "some jobs are lost, some are not"
    assert lags == {0, 1, 2, 3, 4, 5}, "generation runs ahead as far as it may"


def assert_tickets(steps: list[Trained], settings: RolloutConfig) -> None:
    """Followed as a training rank follows them, which sees no more than what a step used."""
    cursor, seen = Cursor(), set()
    for step in steps:
        plan, used = plan_step(cursor, settings), set(step.generated.used)
        assert not used & seen, "a ticket is used twice"
        positions = {plan.cursor.position(ticket) for ticket in used}
        assert positions <= set(range(plan.limit)) and step.generated.long == plan.waits_for_stragglers
        assert not plan.waits_for_stragglers or positions == set(range(len(used)))
        assert len(step.generated.trained) <= plan.goal
        cursor, seen = cursor.after(used), seen | used
        assert seen | set(cursor.skipped) == set(range(cursor.next)), "a ticket is lost"


def assert_versions(steps: list[Trained], staleness: int) -> None:
    versions = [step.version for step in steps]
    assert versions == sorted(versions) and all(0 <= step.lag <= staleness for step in steps)
    times = [step.at for step in steps]
    assert times == sorted(times)


# -- Generator and RemoteRollouts --------------------------------------------------------------------------------------


class Crash(Exception):
    """Of the job, as far as this test is concerned."""


class Engine(FakeEngine):
    """Holds no weights, and answers with the version that it was told."""

    def load(self, weights, version: int) -> None:
        assert version > self.version or not version
        assert not list(weights)
        self.version = version

    def loaded_weights(self):
        return iter(())


class Job:
    """Queue, server and client of one generating and one training rank; the latter goes on whenever it is its turn.

    A turn comes with every look of the generating rank at the news, with every piece, and while it fetches.
    """

    num_bytes = num_trainers = 0
    membership = MemberId(0, bytes(16))

    def __init__(self, draw: random.Random, world: World, cfg: RlvrConfig, crashes: bool) -> None:
        self.draw, self.cfg = draw, cfg
        self.patience = draw.randint(1, 60) if crashes else 10**9
        self.newest, self.staged = -1, []
        self.pieces: dict[tuple[int, tuple[int, ...]], Checked] = {}
        self.steps: list = []
        self.saved: tuple[int, dict] = 0, {"next_ticket": 0, "skipped": [], "prompts": "fake"}
        self.queue = WorkQueue(cfg.rollout, cfg.placement.max_staleness, lambda: 0.0)
        self.queue.enroll(0, "rank 0", True)
        self.link = self.weights = self
        self.rules = None
        rules = PieceRules(cfg.rollout, False, 256)
        self.remote = RemoteRollouts(cfg, FakePrompts(7), FakeTokenizer(), TrainSide(world, self), rules)
        self._slow, self.held = 0, None

    def begin(self, start: int, tickets: dict, steps: list) -> None:
        """From a checkpoint on: what a start of the job does."""
        self.steps, self.saved = steps, (start, tickets)
        self.remote.load_state(tickets)
        self.remote.begin(start)
        self._stage(start)
        self._announce()

    def _stage(self, version: int) -> None:
        self.staged = [*self.staged[-1:], version]  # the last two, as a server does
        self._slow = self.draw.choice([0, 0, 1, 5])

    def _announce(self) -> None:
        assert self.staged[-1] > self.newest
        self.newest = self.staged[-1]

    def turn(self) -> None:
        """What the training rank does now, if anything."""
        self.patience -= 1
        if self.patience < 0:
            raise Crash
        if self.newest < self.staged[-1]:  # it publishes
            self._slow -= 1
            if self._slow < 0:
                self._announce()
                if self.draw.random() < 0.4:
                    self.saved = self.newest, self.remote.state()
        elif self.held not in (None, self.newest):
            pass  # it waits until that has been fetched
        elif self.queue.ended("step", step := self.newest + 1) and step <= self.cfg.steps and self.draw.random() < 0.7:
            self.steps.append(self.remote.collect(step))
            self._stage(step)

    # -- as the link

    @property
    def news(self) -> News:
        self.turn()
        announced = Announcement(self.newest, 0, xxhash.xxh3_128().digest(), False)
        over = self.newest == self.cfg.steps
        return News(True, self.queue.horizon.step, self.queue.oldest, msgspec.msgpack.encode(announced), over=over)

    def check(self) -> None:
        pass

    wait = check

    # -- as the server

    def with_queue(self, do):
        return do(self.queue)

    def collect(self, kind: str, pieces: list) -> list:
        return [self.pieces.pop((piece.number, piece.place)).value for piece in pieces]

    # -- as the client

    def claim(self, kind: str, number: int, version: int, room: int) -> tuple[bool, list[Task]]:
        given = self.queue.claim(0, kind, number, version, room)
        return given.ended, [Task(kind, number, piece.place, piece.claim, b"") for piece in given.pieces]

    def hand_in(self, task: Task, samples, stats: Stats) -> Reported:
        checked = self.remote.check(0, task.kind, task.number, task.place, memoryview(pack(samples)))
        self.pieces[task.number, task.place] = checked
        accepted = self.queue.report(0, task.kind, task.number, task.place, checked.report, stats)
        self.turn()
        return Reported(True, accepted, self.queue.horizon.step)

    def hand_in_probe(self, version: int, answers: bytes) -> None:
        raise AssertionError("nothing is probed")

    def hold(self, version: int) -> bool:
        self.turns()
        self.held = version if version in self.staged else None
        return self.held is not None

    def fetch(self, version: int, num_tensors: int, base: object):
        self.turns()
        assert version in self.staged, "the version is gone before it was fetched"
        self.held = None
        yield from ()

    def release(self, version: int) -> None:
        self.held = None

    def turns(self) -> None:
        for _ in range(self.draw.choice([0, 0, 1, 20])):
            self.turn()


class Second:
    """The courier of the thread that fetches in the middle of a step; turns are the main thread's."""

    num_bytes = 0

    def __init__(self, job: Job) -> None:
        self.job = job

    def hold(self, version: int) -> bool:
        return self.job.hold(version)

    def fetch(self, version: int, num_tensors: int, base: object):
        assert version in self.job.staged, "the version is gone before it was fetched"
        self.job.held = None
        yield from ()

    def give_up(self) -> None:
        pass

    close = give_up


def settings_of(draw: random.Random) -> RlvrConfig:
    cfg = RlvrConfig(seed=draw.randrange(100), steps=draw.randint(2, 6))
    mode = draw.choice(MODES)
    cfg.rollout = replace(
        cfg.rollout, prompts_per_step=draw.randint(1, 2), answers_per_prompt=2, max_new_tokens=8, over_sample=1, **mode
    )
    cfg.placement.mode, cfg.placement.max_staleness = "split", draw.choice([0, 1, 1, 2, 3])
    if not mode and cfg.placement.max_staleness and draw.random() < 0.7:
        cfg.rollout.partial_rollout = True
        cfg.rollout.over_sample = draw.randint(1, cfg.rollout.prompts_per_step * cfg.placement.max_staleness)
    cfg.reward.error_budget, cfg.eval.every = 1.0, 0
    return cfg


class Scorer(FakeScorer):
    """Answers at once."""

    async def score(self, prompt, answer, info) -> Verdict:
        return Verdict("ok", float(random.Random(answer).random() < 0.5))


def live(draw: random.Random, cfg: RlvrConfig, saved: tuple[int, dict] | None, steps: list, crashes: bool) -> tuple:
    """One start of the job, from a checkpoint to its end or a crash; the newest checkpoint."""
    with solo() as world:
        job = Job(draw, world, cfg, crashes)
        start, tickets = saved or job.saved
        del steps[start:]
        engine = Engine(lambda request: 1 + request.seed % 9, max_running=draw.randint(2, 8))
        side = GenerateSide(world, job, lambda: Second(job), world)
        with closing(Generator(cfg, engine, side)) as generating:
            scorer = Scorer(lambda p, a: True)
            rollouts = make_rollouts(cfg, engine, FakePrompts(7), scorer, world, migration=generating.work)
            try:
                job.begin(start, tickets, steps)
                generating.run(rollouts)
            except Crash:
                pass
            finally:
                rollouts.close()
        return job.saved


def test_generator_and_remote_rollouts_keep_the_bound(monkeypatch) -> None:
    monkeypatch.setattr(remote_step, "CLAIM_SECONDS", 0.0)
    monkeypatch.setattr(generator, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(in_flight, "LOOK_SECONDS", 0.0)
    most, lags, mixed = 0, set(), 0
    for seed in range(100):
        draw = random.Random(seed)
        cfg, steps, saved, lives = settings_of(draw), [], None, 0
        while len(steps) < cfg.steps:
            saved = live(draw, cfg, saved, steps, crashes=lives < 4)
            lives += 1
        assert_steps(steps, cfg, lags)
        most = max(most, lives)
        turns = [turn for step in steps for group in step.groups for sample in group.samples for turn in sample.turns]
        mixed += sum(len(set(turn.versions)) > 1 for turn in turns)
    assert most > 2 and {0, 1, 2} <= lags and mixed > 20, "answers of two versions, too"


def assert_steps(steps: list, cfg: RlvrConfig, lags: set[int]) -> None:
    """Tickets and versions of what counts; `lags` gets what there was."""
    used = [ticket for step in steps for ticket in sorted({*step.table.answers["ticket"].tolist()})]
    assert len(used) == len(set(used)), "a ticket is used twice"
    if cfg.rollout.tail == "none" and cfg.rollout.accept == "in_order":
        assert used == list(range(len(used))), "a ticket is lost"
    for number, step in enumerate(steps, 1):
        samples = [sample for group in step.groups for sample in group.samples]
        versions = {version for sample in samples for turn in sample.turns for version in turn.versions}
        lags |= {number - 1 - version for version in versions}
        assert step.step == number
        assert all(0 <= number - 1 - version <= cfg.placement.max_staleness for version in versions)
