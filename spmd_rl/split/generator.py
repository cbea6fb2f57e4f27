"""`Generator`: a generating rank's part of a run: load a policy, generate the next step, hand it over."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from spmd_rl import sidecar
from spmd_rl.config.schema import PipelineConfig
from spmd_rl.config.sections.env import EnvsConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.engine import Engine
from spmd_rl.engine import build as build_engine
from spmd_rl.learn import Evaluation
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout import Agent, Rollouts, Services
from spmd_rl.split.groups import StepPart, pack
from spmd_rl.split.pace import is_evaluated, oldest_version, oldest_version_at
from spmd_rl.split.sides import GenerateSide, announced
from spmd_rl.weights.in_flight import InFlight
from spmd_rl.weights.messages import Announcement
from spmd_rl.weights.receiver import WeightReceiver
from spmd_rl.weights.replica_broadcast import ReplicaBroadcast

T = TypeVar("T")

LOOK_SECONDS = 0.02
"""The pause between two looks for a newer version while nothing can be generated."""


class Generator:
    """Runs ahead of training by at most `placement.max_staleness` steps."""

    def __init__(self, cfg: PipelineConfig, engine: Engine, rollouts: Rollouts, side: GenerateSide, store: Any) -> None:
        """store: that of all ranks."""
        self._cfg, self._rollouts = cfg, rollouts
        self._evaluation = Evaluation(cfg.eval, cfg.rollout, cfg.seed, cfg.steps, cfg.reward.error_budget)
        self._courier, self._world, self._together, self._start = side.courier, side.world, side.together, 0
        replica = ReplicaBroadcast(side.world, cfg.engine.tp)  # [all] that generate
        self._store = store
        report = partial(self._deliver, "probe")
        self._receiver = WeightReceiver(engine, replica, side.world, self._announced, report, cfg.publish.delta)
        self._met = -1
        """The version that all generating ranks have at least."""
        swap = cfg.placement.swap
        self._in_flight = InFlight(self._receiver, side.connect if swap != "step" else None, swap == "keep")

    @classmethod
    @contextmanager
    def build(
        cls,
        cfg: PipelineConfig,
        prompts: Prompts | EnvTasks,
        tokenizer: Tokenizer,
        side: GenerateSide,
        world: World,
        envs: EnvsConfig | None = None,
    ) -> Iterator["Generator"]:
        """[all] that generate: the engine of this rank, and who keeps it busy. `world`: all ranks."""
        with ExitStack() as stack:
            with world.phase("start"), world.journal.extend_timeout(cfg.journal.start_seconds):
                host = sidecar.connect_both(cfg.reward, envs, world.node, cfg.sidecar.bind, False, cfg.sidecar.keys)
                scorer, environments = stack.enter_context(host)
                engine = build_engine(cfg.engine, cfg.policy, cfg.train.offload, side.together)  # [all]
            episode = Agent(envs) if envs and not cfg.rollout.target else None
            services = Services(scorer, tokenizer, episode, environments if envs else None)
            parts = cfg.generation, engine, prompts, services, side.together, side.courier.holder, side.handover
            rollouts = stack.enter_context(closing(Rollouts(*parts)))  # [all]
            rollouts.check()
            generator = stack.enter_context(closing(cls(cfg, engine, rollouts, side, world.store)))
            yield generator
            engine.close()  # not with an exception pending: an engine's own groups may wait for other ranks

    def run(self, start: int, tickets: dict[str, Any]) -> None:
        """[all] that generate: from the policy of version `start`, all steps that are left, and what evaluation asks.

        tickets: the state of the rollouts in the checkpoint of that step. RunFailed if the weights that arrive, or that
        an engine then holds, are not those that the trainers announced.
        """
        self._rollouts.load_state(tickets)
        last, self._start = self._cfg.steps, start
        self._follow(start)  # [all]
        for step in range(max(start, self._cfg.num_shown) + 1, last + 1):
            self._world.journal.set_step(step)
            self._step(step)  # [all]
        self._follow(last)  # [all] which may be evaluated
        self._together.barrier("generate: last step")  # [all] one of them may keep the sidecar of the others

    def close(self) -> None:
        """Give up what is on its way; idempotent."""
        self._in_flight.close()

    def _step(self, step: int) -> None:
        """[all] Generate a step and hand over what of it lies here."""
        settings, began = self._cfg.placement, time.perf_counter()
        self._follow(oldest_version(step, settings.max_staleness, self._start))  # [all]
        waited = time.perf_counter() - began
        order = {"step": step, "per_step": self._cfg.rollout.prompts_per_step}
        bound = {"max_staleness": settings.max_staleness, "start": self._start}
        self._in_flight.begin(partial(oldest_version_at, **order, **bound))
        collected, report = self._rollouts.generate(step, self._in_flight)  # [all]
        slices = sorted(collected.slices.items())
        self._deliver("step", step, pack(StepPart(report, slices, waited, self._in_flight.seconds)))
        self._in_flight.settle()  # [all] of the replica

    def _follow(self, at_least: int) -> None:
        """[all] Load the newest version, and those that come, until one is as new as that."""
        while True:
            newest = self._newest(at_least)  # [all]
            if newest.version > self._met:
                self._load(newest)  # [all]
                self._met = newest.version
                self._evaluate(newest.version)  # [all]
            if self._met >= at_least:
                return

    def _newest(self, at_least: int) -> Announcement:
        """[all] What the first rank finds; while that is too old to generate with, it waits for news.

        A newer version than all ranks have is held: training ranks keep it until it has been fetched.
        """
        waits = f"publish: version {at_least} from ranks that train"
        look = partial(self._look, at_least)
        return self._first_finds("publish: newest version", waits, look, Announcement)  # [all]

    def _first_finds(self, name: str, waits: str, look: Callable[[], T | None], kind: type[T]) -> T:
        """[all] What the first rank finds, which looks until there is something. waits: for what, in a hang report."""
        found = None
        if self._world.rank == 0:
            with self._world.journal.waiting(waits):
                while found is None:
                    found = look()
        record = msgspec.to_builtins(found, builtin_types=(bytes,)) if found else None
        return msgspec.convert(self._world.broadcast(name, record), kind)  # [all]

    def _announced(self) -> Announcement | None:
        """The newest version."""
        return announced(self._store)

    def _look(self, at_least: int) -> Announcement | None:
        """What has been announced, if that lets generation go on; pause if nothing has."""
        if newest := self._receiver.newest():
            if newest.version <= self._met and at_least <= self._met:
                return newest
            if newest.version > self._met and self._courier.hold(newest.version):
                return newest
        time.sleep(LOOK_SECONDS)
        return None

    def _load(self, newest: Announcement) -> None:
        """[all] Fetch a version and give it to the engine, unless this replica took it in the middle of a step."""
        receiver, leads = self._receiver, self._receiver.replica.leads
        if leads:
            self._courier.hold(newest.version)
        self._world.barrier("publish: all fetch")  # [all] the first rank holds it until then
        if newest.version > receiver.version:
            pieces = receiver.fetch(newest, self._courier) if leads else None
            receiver.load(newest, pieces, self._courier)  # [all] of the replica
        elif leads:
            self._courier.release(newest.version)

    def _evaluate(self, version: int) -> None:
        """[all] Answer the held-out prompts where this version is evaluated; a resumed run does not do it again.

        Ranks that are lent answer them alone.
        """
        if self._together is not self._world:
            return
        prompts, samplings = self._evaluation.questions(self._rollouts.prompts.eval, version)
        if samplings and is_evaluated(version, self._start):
            with self._world.phase("eval"):
                groups = self._rollouts.answer(prompts, samplings)  # [all]
            self._deliver("eval", version, pack(groups))

    def _deliver(self, kind: str, number: int, payload: bytes) -> None:
        with self._world.journal.waiting(f"{kind} {number}: handed over"):
            self._courier.deliver(kind, number, payload)
