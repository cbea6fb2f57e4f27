"""The rules of `placement.meetings`, in random histories of the code itself.

Every rank is a thread, of which one runs at a time; which one is next is drawn at every operation of the store, at
every engine step and at every collective, with clocks that run at different speeds. A rank may die anywhere; the job
then goes on from its checkpoint.
"""

import gc
import random
import threading
from collections import Counter, defaultdict
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from bench.virtual.simulate.store import CountingStore
from spmd_rl.config import RlvrConfig
from spmd_rl.learn import Evaluation
from spmd_rl.placement import generator as generators
from spmd_rl.placement import meetings, trainers
from spmd_rl.placement.generator import Generator
from spmd_rl.placement.trainers import LentReplica, ReceivedRollouts
from spmd_rl.rollout import Services, coordinator, engine_loop
from spmd_rl.rollout.ahead import Replicas, StepsAhead
from spmd_rl.rollout.player import Player
from spmd_rl.types import Verdict
from tests.fakes import FakeEngine, FakePrompts, FakeScorer, FakeTokenizer

HISTORIES = [range(100), *(pytest.param(range(n, n + 100), marks=pytest.mark.slow) for n in range(100, 500, 100))]
MODES = ({}, {"accept": "first_finished"}, {"tail": "defer"}, {"claim": "static"})


class Over(BaseException):
    """A rank has died, and the others end with it."""


class Threads:
    """Ranks, of which one runs at a time."""

    def __init__(self, draw: random.Random, size: int, turns: int) -> None:
        """turns: until one of them dies."""
        self.draw, self.turns, self.is_over = draw, turns, False
        self.errors: list[BaseException] = []
        self.speed = [draw.choice([1, 1, 3, 20]) for _ in range(size)]
        self._locks = [threading.Semaphore(0) for _ in range(size)]
        self._ready = set(range(size))
        self._arrived: dict[tuple, dict[int, bytes]] = defaultdict(dict)
        self.doors: dict[int, tuple] = {}
        """The collective in which a rank waits."""

    def run(self, tasks: list) -> None:
        threads = [threading.Thread(target=self._run, args=(rank, task)) for rank, task in enumerate(tasks)]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _run(self, rank: int, task) -> None:
        self._locks[rank].acquire()
        try:
            if not self.is_over:
                task()
        except Over:
            pass
        except BaseException as error:
            self.errors.append(error)
            self.is_over = True
        self._ready.discard(rank)
        self.doors.pop(rank, None)
        self._pass_on()

    def _pass_on(self) -> None:
        """Let another rank run."""
        if self.is_over:
            for lock in self._locks:
                lock.release()
        elif self._ready:
            ready = sorted(self._ready)
            self._locks[self.draw.choices(ready, [self.speed[rank] for rank in ready])[0]].release()
        elif self.doors:
            self.errors.append(AssertionError(f"nobody can go on: {self.doors}"))
            self.is_over = True
            self._pass_on()

    def turn(self, rank: int) -> None:
        """Let another rank run, perhaps."""
        self.turns -= 1
        if self.turns < 0:
            self.is_over = True
        if not self.is_over and self.draw.random() < 0.3:
            self._pass_on()
            self._locks[rank].acquire()
        if self.is_over:
            raise Over

    def meet(self, ranks: tuple[int, ...], number: int, name: str, rank: int, record: bytes) -> list[bytes]:
        """What all of these ranks bring to their meeting of this number."""
        self.turn(rank)
        key = (ranks, number)
        there = self._arrived[key]
        assert all(one[0] == name for one in there.values()), f"{name}: {there} are elsewhere"
        there[rank] = (name, record)
        if len(there) == len(ranks):
            self._ready |= set(ranks)
            for one in ranks:
                self.doors.pop(one, None)
        else:
            self._ready.discard(rank)
            self.doors[rank] = (name, ranks, number)
            self._pass_on()
            self._locks[rank].acquire()
            if self.is_over:
                raise Over
        return [there[one][1] for one in ranks]


class View:
    """One rank's connection to the store."""

    def __init__(self, store: CountingStore, threads: Threads, rank: int) -> None:
        self._store, self._threads, self._rank = store, threads, rank

    def __getattr__(self, name: str):
        def call(*args):
            self._threads.turn(self._rank)
            keys = {"get": list(args[:1]), "multi_get": args[0]}.get(name)
            while keys and not self._store.check(keys):  # as a TCPStore does, wait for them
                self._threads.turn(self._rank)
            return getattr(self._store, name)(*args)

        return call


class World:
    """Some ranks; what of `distributed.World` the code under test asks for."""

    def __init__(self, run: "Run", threads: Threads, store: View, ranks: tuple[int, ...], me: int) -> None:
        self.run, self.trainers = run, range(run.num_train)
        self.threads, self.store, self.ranks = threads, store, ranks
        self.rank, self.size, self._me, self._number = ranks.index(me), len(ranks), me, 0
        self.journal = SimpleNamespace(
            waiting=lambda name: nullcontext(),
            idle=lambda idle: None,
            set_step=lambda step: None,
            expect=lambda seconds: None,
            progress=0,
        )

    def _meet(self, name: str, record: bytes) -> list[bytes]:
        self._number += 1
        waits = self.size > 1 and self._me not in self.trainers and name != "start: first step"
        assert not (waits and self.run.updating), f"R1: {name} waits for an update"
        return self.threads.meet(self.ranks, self._number, name, self._me, record)

    def gather(self, name: str, record, type=None) -> list:
        found = self._meet(name, msgspec.msgpack.encode(record))
        return [msgspec.msgpack.decode(one, type=type) if type else msgspec.msgpack.decode(one) for one in found]

    def broadcast(self, name: str, record, src: int = 0):
        return self.gather(name, record)[src]

    def barrier(self, name: str) -> None:
        self._meet(name, b"")

    def exchange(self, name: str, rows, sent, received, agreed=None):
        assert len(rows) == sum(sent)
        parts = [bytes(part.reshape(-1).numpy()) for part in rows.split(list(sent))]
        mine = [theirs[self.rank] for theirs in self.gather(name, parts, list[bytes])]
        assert [len(part) for part in mine] == list(received)
        return torch.frombuffer(bytearray(b"".join(mine)) or bytearray(1), dtype=torch.uint8)[: sum(received), None]

    def phase(self, name: str):
        return nullcontext()

    def progress(self, n: int = 1) -> None:
        pass


class Engine(FakeEngine):
    """Answers have a length of their own, whatever was sampled of them before."""

    def __init__(self, world: World, max_running: int) -> None:
        super().__init__(lambda request: 1 + request.seed % 9 - request.num_begun, max_running)
        self.version, self._world = -1, world

    def add(self, request) -> None:
        assert self.version >= 0, "a request before there is a policy"
        super().add(request)

    def load(self, version: int) -> None:
        assert version > self.version and not self.running, "R4: an engine that loads is empty"
        self.version = version

    def step(self) -> list:
        self._world.threads.turn(self._world.ranks[self._world.rank])
        return super().step()


class Scorer(FakeScorer):
    """Answers at once."""

    async def score(self, prompt, answer, info) -> Verdict:
        return Verdict("ok", float(random.Random(answer + prompt.id).random() < 0.5))


class CountingPlayer(Player):
    """Counts slices that it goes on with, begun or finished by a lent replica."""

    taken: Counter = Counter()

    def take(self, group_slice, begun, samples) -> None:
        self.taken["finished" if samples else "begun"] += 1
        super().take(group_slice, begun, samples)


@dataclass
class Run:
    """A run over all its starts."""

    cfg: RlvrConfig
    num_train: int
    num_generate: int
    steps: dict[int, dict] = field(default_factory=dict)
    """By step, what each rank that trains has collected."""
    evaluated: dict[int, dict] = field(default_factory=dict)
    saved: tuple[int, dict] = (0, {"next_ticket": 0, "skipped": [], "prompts": "fake"})
    updating: set[int] = field(default_factory=set)
    """Ranks that are in an update."""
    num_keys: int = 0


def prompts() -> FakePrompts:
    return FakePrompts(7)


class Rank:
    """What a rank has whether it trains or generates."""

    def __init__(self, run: Run, threads: Threads, store: CountingStore, me: int) -> None:
        size = run.num_train + run.num_generate
        self.run, self.threads, self.trains = run, threads, me < run.num_train
        view = View(store, threads, me)
        self.world = World(run, threads, view, tuple(range(size)), me)
        lent = run.cfg.placement.is_lent
        first = 0 if lent else run.num_train
        replicas = Replicas(
            max(0, me - first), size - first, {rank - first: rank for rank in range(run.num_train, size)}
        )
        staleness, rollout = run.cfg.placement.max_staleness, run.cfg.rollout
        self.steps = StepsAhead(view, rollout, staleness, replicas, lambda ticket: float(ticket % 3))
        self.player = None
        if lent or not self.trains:
            engine = Engine(self.world, threads.draw.randint(2, 8))
            services = Services(Scorer(lambda p, a: True), FakeTokenizer())
            self.player = CountingPlayer(
                run.cfg.generation, engine, prompts(), services, self.world, replicas.count, leaves=self.trains
            )

    def generate(self) -> None:
        Generator(
            self.run.cfg, self.world, self.player, prompts(), self.steps, self, tuple(range(self.run.num_train))
        ).run()
        self.world.barrier("generate: last step")

    # -- as the receiver of weights

    @property
    def version(self) -> int:
        return self.player.engine.version

    def load(self, version: int, probed: bool) -> None:
        assert self.world.gather("publish", version) == [version] * self.world.size
        self.player.engine.load(version)

    # -- as a rank that trains

    def publish(self, version: int) -> None:
        def send(version: int) -> dict:
            self.world.gather("publish", version)
            if self.player:
                self.player.engine.load(version)
            return {}

        self.rollouts.published(send, version, False)

    def train(self) -> None:
        run, cfg, world = self.run, self.run.cfg, self.world
        members = tuple(range(run.num_train))
        trainers_world = World(run, self.threads, world.store, members, world.rank)
        evaluate, asked = Evaluation.of(cfg), prompts()
        lent = LentReplica(cfg, self.player, self.steps) if self.player else None
        with closing(lent) if lent else nullcontext():
            self.rollouts = ReceivedRollouts(cfg, asked, world, trainers_world, self.steps, lent)
            start, state = run.saved
            self.rollouts.load_state(state)
            self.rollouts.begin(start)
            self.publish(start)
            for step in range(start, cfg.steps + 1):
                if step > start:
                    collected = self.rollouts.collect(step)
                    run.steps.setdefault(step, {})[world.rank] = collected
                    run.updating.add(world.rank)
                    for _ in range(self.threads.draw.choice([0, 3, 100])):
                        self.threads.turn(world.rank)
                    run.updating.remove(world.rank)
                    self.publish(step)
                questions, samplings = evaluate.questions(asked.eval, step)
                if samplings and (step > start or not start):
                    answers = self.rollouts.answer(questions, samplings)
                    run.evaluated.setdefault(step, {})[world.rank] = answers
                if step > start and step % 2 == 0:
                    trainers_world.barrier("save")
                    if world.rank == 0:
                        run.saved = step, self.rollouts.state()
            self.rollouts.finish()
            world.barrier("generate: last step")


def settings_of(draw: random.Random) -> RlvrConfig:
    cfg = RlvrConfig(seed=draw.randrange(100), steps=draw.randint(2, 5))
    mode, staleness = draw.choice(MODES), draw.choice([0, 1, 1, 2, 3])
    cfg.rollout = replace(
        cfg.rollout, prompts_per_step=draw.randint(1, 3), answers_per_prompt=2, max_new_tokens=12, over_sample=1, **mode
    )
    if draw.random() < 0.3 and "claim" not in mode:
        cfg.rollout.answers_per_claim = 1
    cfg.placement.mode, cfg.placement.max_staleness = draw.choice(["split", "lent"]), staleness
    if not mode and staleness and draw.random() < 0.7:
        cfg.rollout.partial_rollout = True
        cfg.rollout.over_sample = draw.randint(1, cfg.rollout.prompts_per_step * staleness)
    if draw.random() < 0.5:
        cfg.rollout.filter.zero_variance = True
    cfg.reward.error_budget, cfg.eval.every, cfg.eval.answers = 1.0, draw.choice([0, 1, 2]), 2
    return cfg


def live(run: Run, draw: random.Random, dies: bool) -> bool:
    """One start of the job, from its checkpoint to its end or a death; whether it came to its end."""
    start = run.saved[0]
    run.updating.clear()
    run.steps = {step: found for step, found in run.steps.items() if step <= start}
    run.evaluated = {step: found for step, found in run.evaluated.items() if step <= start}
    size, store = run.num_train + run.num_generate, CountingStore()
    threads = Threads(draw, size, draw.randint(20, 3000) if dies else 10**7)
    ranks = [Rank(run, threads, store, rank) for rank in range(size)]
    threads.run([rank.train if rank.trains else rank.generate for rank in ranks])
    run.num_keys = len(store)
    return not threads.is_over


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch) -> None:
    for module, name in (
        *((generators, "IDLE_SECONDS"), (meetings, "MEETING_POLL_SECONDS"), (trainers, "STEP_POLL_SECONDS")),
        (engine_loop, "IDLE_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(coordinator, "POLLS_PER_SECOND", 1e12)


@pytest.mark.parametrize("seeds", HISTORIES, ids=str)
def test_in_random_histories_no_ticket_is_lost_and_no_token_too_old(
    seeds: range, caplog: pytest.LogCaptureFixture
) -> None:
    lags, lives, mixed, modes = set(), [], 0, set()
    CountingPlayer.taken.clear()
    for seed in seeds:
        draw = random.Random(seed)
        run, starts = Run(settings_of(draw), draw.randint(1, 2), draw.randint(1, 3)), 1
        while not live(run, draw, dies=starts < 4 and draw.random() < 0.6):
            starts += 1
        try:
            mixed += assert_steps(run, lags)
            assert_answers(run)
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error
        lives.append(starts)
        modes.add(run.cfg.placement.mode)
        assert run.num_keys < 60, "keys of old steps stay in the store"
    assert max(lives) > 3 and lives.count(1) > len(seeds) // 5 and modes == {"split", "lent"}
    assert CountingPlayer.taken.total() > 5, "what lent replicas left goes on"
    assert {0, 1, 2, 3} <= lags and mixed > 20, "answers of two versions, too"
    gc.collect()
    assert not caplog.records, "asyncio logs what nobody retrieved, for instance the samples of a run that failed"


def assert_steps(run: Run, lags: set[int]) -> int:
    """Tickets, samples and versions of all steps; the number of turns of several versions."""
    cfg, seen, mixed = run.cfg, [], 0
    assert sorted(run.steps) == list(range(1, cfg.steps + 1))
    for number, by_rank in sorted(run.steps.items()):
        tables = [one.table for one in by_rank.values()]
        assert len(by_rank) == run.num_train and all(
            one.answers.tolist() == tables[0].answers.tolist() for one in tables
        )
        seen += tables[0].tickets.tolist()
        held = defaultdict(list)
        for rank, one in by_rank.items():
            for group in (*one.groups, *(group for group, _ in one.dropped)):
                held[group.ticket] += [(sample.answer, rank, sample) for sample in group.samples]
        expected = {(row["ticket"], row["answer"], row["rank"]) for row in tables[0].answers}
        assert {(ticket, answer, rank) for ticket, some in held.items() for answer, rank, _ in some} == expected
        assert sum(map(len, held.values())) == len(expected), "a sample twice"
        for turn in (turn for some in held.values() for _, _, sample in some for turn in sample.turns):
            ages = [number - 1 - version for version in turn.versions]
            assert list(turn.versions) == sorted(turn.versions), (
                "R4: tokens of an older policy after those of a newer one"
            )
            assert all(0 <= age <= cfg.placement.max_staleness for age in ages), f"step {number}: tokens of age {ages}"
            assert len(set(turn.token_ids)) == 1, "R4: what was sampled is written over"
            lags |= set(ages)
            mixed += len(set(ages)) > 1
    assert len(seen) == len(set(seen)), "a ticket is used twice"
    if cfg.rollout.tail == "none" and cfg.rollout.accept == "in_order":
        assert seen == list(range(len(seen))), "a ticket is lost"
    return mixed


def assert_answers(run: Run) -> None:
    """R7: each held-out question once, and by the version that is evaluated."""
    every, last = run.cfg.eval.every, run.cfg.steps
    due = {step for step in range(last + 1) if every and (step % every == 0 or step == last)}
    assert set(run.evaluated) == due
    for version, by_rank in run.evaluated.items():
        samples = [sample for groups in by_rank.values() for group in groups for sample in group.samples]
        assert sorted((s.ticket, s.answer) for s in samples) == [(n, a) for n in range(2) for a in range(3)]
        assert {v for s in samples for turn in s.turns for v in turn.versions} == {version}
