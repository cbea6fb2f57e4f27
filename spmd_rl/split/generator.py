"""`Generator`: a generating rank's part of a run: load a policy, generate the next step, hand it over."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import msgspec
import xxhash

from spmd_rl import sidecar
from spmd_rl.config.schema import PipelineConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.engine import Engine
from spmd_rl.engine import build as build_engine
from spmd_rl.errors import RunFailed
from spmd_rl.learn import questions
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout import Agent, Rollouts
from spmd_rl.split.groups import StepPart, pack
from spmd_rl.split.kept import Kept
from spmd_rl.split.pace import oldest_version
from spmd_rl.split.publisher import NEWEST, Announcement, ProbePart
from spmd_rl.split.sides import GenerateSide
from spmd_rl.sync import WeightStream, difference, probe

LOOK_SECONDS = 0.02
"""The pause between two looks for a newer version while nothing can be generated."""


class Generator:
    """Runs ahead of training by at most `placement.max_staleness` steps."""

    def __init__(self, cfg: PipelineConfig, engine: Engine, rollouts: Rollouts, side: GenerateSide, store: Any) -> None:
        """store: that of all ranks."""
        self._cfg, self._engine, self._rollouts = cfg, engine, rollouts
        self._courier, self._world, self._store = side.courier, side.world, store
        self._version, self._start = -1, 0
        self._kept = Kept() if cfg.publish.delta else None

    @classmethod
    @contextmanager
    def build(
        cls, cfg: PipelineConfig, prompts: Prompts | EnvTasks, tokenizer: Tokenizer, side: GenerateSide, world: World
    ) -> Iterator["Generator"]:
        """[all] that generate: the engine of this rank, and who keeps it busy. `world`: all ranks."""
        envs = getattr(cfg, "env", None)
        with ExitStack() as stack:
            with world.phase("start"), world.journal.slow(cfg.journal.start_seconds):
                host = sidecar.connect_both(cfg.reward, envs, world.node, cfg.sidecar.bind, False, cfg.sidecar.keys)
                scorer, environments = stack.enter_context(host)
                engine = build_engine(cfg, side.world)  # [all]
            episode = Agent(envs) if envs and not cfg.rollout.target else None
            services = {"episode": episode, "environments": environments if envs else None}
            rollouts = Rollouts(  # [all]
                cfg, engine, prompts, scorer, tokenizer, side.world, **services, holder=side.courier.holder
            )
            stack.enter_context(closing(rollouts))
            rollouts.check()
            yield cls(cfg, engine, rollouts, side, world.store)
            engine.close()  # not with an exception pending: an engine's own groups may wait for other ranks

    def run(self, start: int, tickets: dict[str, Any]) -> None:
        """[all] that generate: from the policy of version `start`, all steps that are left, and what evaluation asks.

        tickets: the state of the rollouts in the checkpoint of that step. RunFailed if the weights that arrive, or that
        an engine then holds, are not those that the trainers announced.
        """
        self._rollouts.load_state(tickets)
        last, warmup = self._cfg.steps, getattr(self._cfg, "warmup", None)
        shown = warmup.steps if warmup else 0  # the steps in which the trainers need nobody
        self._start = start
        self._follow(start)  # [all]
        for step in range(max(start, shown) + 1, last + 1):
            self._world.journal.set_step(step)
            began = time.perf_counter()
            self._follow(oldest_version(step, self._cfg.placement.max_staleness, start))  # [all]
            waited = time.perf_counter() - began
            generated = self._rollouts.generate(step)  # [all]
            finished = sorted(generated.finished.items(), key=lambda pair: pair[0])
            self._deliver("step", step, pack(StepPart(generated.report, finished, waited)))
        self._follow(last)  # [all] which may be evaluated
        self._world.barrier("generate: last step")  # [all] one of them may keep the sidecar of the others

    def _follow(self, at_least: int) -> None:
        """[all] Load the newest version, and those that come, until one is as new as that."""
        while True:
            newest = self._newest(at_least)  # [all]
            if newest.version > self._version:
                self._load(newest)  # [all]
                self._evaluate(newest.version)  # [all]
            if self._version >= at_least:
                return

    def _newest(self, at_least: int) -> Announcement:
        """[all] What the first rank finds; while that is too old to generate with, it waits for news.

        A newer version than the one that is loaded is held: training ranks keep it until it has been fetched.
        """
        found = None
        if self._world.rank == 0:
            with self._world.journal.waiting(f"publish: version {at_least} from ranks that train"):
                while found is None:
                    found = self._look(at_least)
        record = msgspec.to_builtins(found, builtin_types=(bytes,)) if found else None
        return msgspec.convert(self._world.broadcast("publish: newest version", record), Announcement)  # [all]

    def _look(self, at_least: int) -> Announcement | None:
        """What has been announced, if that lets generation go on; pause if nothing has."""
        if self._store.check([NEWEST]):
            newest = msgspec.msgpack.decode(self._store.get(NEWEST), type=Announcement)
            if newest.version <= self._version and at_least <= self._version:
                return newest
            if newest.version > self._version and self._courier.hold(newest.version):
                return newest
        time.sleep(LOOK_SECONDS)
        return None

    def _load(self, newest: Announcement) -> None:
        """[all] Fetch a version, give it to the engine, and prove that it is what was announced."""
        answers, whole = [], xxhash.xxh3_128()
        self._courier.hold(newest.version)
        self._world.barrier("publish: all fetch")  # [all] the first rank holds it until then
        with self._world.phase("publish"), self._engine.awake():

            def arriving() -> Any:
                for name, tensor, digest in self._courier.fetch(newest.version, newest.num_pieces, self._kept):
                    whole.update(name.encode() + digest)
                    yield name, tensor

            stream = WeightStream(arriving(), self._world.device, self._world.progress)
            self._engine.load(stream, newest.version)  # [all] of the replica
            for _ in stream:  # whatever the engine left
                pass
            fault = difference(self._engine, stream, self._world.device)
            if whole.digest() != newest.digest:
                fault = "other weights have arrived than the trainers announced"
            if not fault and newest.probed:
                answers, fault = probe.ask(self._engine, newest.version)
            if fault:
                raise RunFailed(f"publish of version {newest.version}, generating rank {self._world.rank}: {fault}")
            if self._kept:
                self._kept.complete(newest.version, newest.digest)
            arrived = {"bytes": self._courier.num_bytes, "whole": stream.num_bytes}
            self._world.journal.note("fetched", version=newest.version, **arrived)
        self._version = newest.version
        if newest.probed:
            self._deliver("probe", newest.version, msgspec.msgpack.encode(ProbePart(answers)))

    def _evaluate(self, version: int) -> None:
        """[all] Answer the held-out prompts where this version is evaluated; a resumed run does not do it again."""
        prompts, samplings = questions(self._cfg, self._rollouts.prompts.eval, version)
        if samplings and (version == 0 or version > self._start):
            with self._world.phase("eval"):
                groups = self._rollouts.answer(prompts, samplings)  # [all]
            self._deliver("eval", version, pack(groups))

    def _deliver(self, kind: str, number: int, payload: bytes) -> None:
        with self._world.journal.waiting(f"{kind} {number}: handed over"):
            self._courier.deliver(kind, number, payload)
