"""`Generator`: the ranks that only generate, of the training job or attached to it: load the newest policy, claim what
there is to do, hand in each piece at once.

The ranks of one job go from work to work together, as a replica may have several of them; the ranks of different jobs
know nothing of each other. Whatever an attached rank has not handed in when it dies, another does again, with the same
noise.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Literal

import msgspec

from spmd_rl import sidecar
from spmd_rl.config.schema import RlConfig
from spmd_rl.config.sections.env import EnvsConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.engine import Engine
from spmd_rl.engine import build as build_engine
from spmd_rl.learn import Evaluation
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rollout import Agent, Rollouts, Services
from spmd_rl.rollout.player import Question
from spmd_rl.split.client import Task
from spmd_rl.split.remote_step import RemoteWork
from spmd_rl.split.sides import GenerateSide
from spmd_rl.types import Group
from spmd_rl.weights.in_flight import InFlight
from spmd_rl.weights.messages import Announcement
from spmd_rl.weights.receiver import WeightReceiver
from spmd_rl.weights.replica_broadcast import ReplicaBroadcast

LOOK_SECONDS = 0.02
"""The pause between two looks for something to do."""


class GeneratorTask(msgspec.Struct, array_like=True):
    """What the generating ranks of a job do next."""

    kind: Literal["load", "step", "eval", "over"]
    number: int = 0
    step: int = 0
    """The one that is open."""
    newest: Announcement | None = None


class Generator:
    """Runs ahead of training by at most `placement.max_staleness` steps."""

    def __init__(self, cfg: RlConfig, engine: Engine, side: GenerateSide) -> None:
        """[all] that generate."""
        self._cfg, self._client, self._world, self._together = cfg, side.client, side.world, side.together
        self._evaluation = Evaluation.of(cfg)
        replica = ReplicaBroadcast(side.world, cfg.engine.ranks)  # [all] that generate
        report = self._client.hand_in_probe
        self._receiver = WeightReceiver(engine, replica, side.world, self._announced, report, False)
        self._met = -1
        """The version that all generating ranks of this job have at least."""
        self._last_step, self._waited_since = 0, 0.0
        self._in_flight = InFlight(self._receiver, side.connect, False)
        self.work = RemoteWork(side.client)

    @classmethod
    @contextmanager
    def build(
        cls,
        cfg: RlConfig,
        prompts: Prompts | EnvTasks,
        tokenizer: Tokenizer,
        side: GenerateSide,
        world: World,
        envs: EnvsConfig | None = None,
    ) -> Iterator[tuple["Generator", Rollouts]]:
        """[all] that generate: the engine of this rank, and who keeps it busy. `world`: all ranks."""
        with ExitStack() as stack:
            with world.phase("start"), world.journal.extend_timeout(cfg.journal.start_seconds):
                host = sidecar.connect_both(cfg.reward, envs, world.node, cfg.sidecar.bind, False, cfg.sidecar.keys)
                scorer, environments = stack.enter_context(host)
                sleeps, constraint = cfg.train.offload, cfg.rollout.constraint
                engine = build_engine(cfg.engine, cfg.policy, sleeps, side.together, constraint)  # [all]
            episode = Agent(envs) if envs and not cfg.rollout.target else None
            services = Services(scorer, tokenizer, episode, environments if envs else None)
            generator = stack.enter_context(closing(cls(cfg, engine, side)))
            parts = cfg.generation, engine, prompts, services, side.together, generator.work
            rollouts = stack.enter_context(closing(Rollouts(*parts)))  # [all]
            rollouts.check()
            yield generator, rollouts
            engine.close()  # not with an exception pending: an engine's own groups may wait for other ranks

    def run(self, rollouts: Rollouts) -> None:
        """[all] that generate: work until the run is over.

        RunFailed if the weights that arrive, or that an engine then holds, are not those that the trainers announced,
        or if the training job is gone or has given this rank up.
        """
        self._client.link.ready, journal = True, self._world.journal
        while (job := self._next()).kind != "over":  # [all]
            if job.step != journal.step:
                journal.set_step(job.step)
            if job.kind == "load":
                self._load(job.newest)  # [all]
                self._waited_since = self._waited_since or time.perf_counter()
                self._met = job.number
            elif job.kind == "eval":
                self._answer(rollouts, job.number)  # [all]
            else:
                self._in_flight.begin()
                waited, swaps = time.perf_counter() - self._waited_since, self._in_flight.seconds
                self.work.begin(job.number, lambda: self._receiver.version, waited, swaps)
                rollouts.generate_from(self.work, job.number, self._in_flight)  # [all] of the replica
                self._in_flight.settle()  # [all] of the replica
                self._last_step, self._waited_since = job.number, time.perf_counter()
                journal.note("handed in", slices=self.work.num_accepted)
        self._together.barrier("generate: last step")  # [all] one of them may keep the sidecar of the others

    def close(self) -> None:
        """Give up what is on its way; idempotent."""
        self._in_flight.close()

    def _answer(self, rollouts: Rollouts, version: int) -> None:
        """[all] Answer held-out prompts as long as there are some that nobody has claimed."""
        held_out, samplings = self._evaluation.questions(rollouts.prompts.eval, version)
        tasks: dict[int, Task] = {}

        def claim(room: int) -> list[Question]:
            claimed = {task.place[0]: task for task in self._client.claim("eval", version, version, room)[1]}
            tasks.update(claimed)
            return [Question(index, held_out[index], dict(enumerate(samplings))) for index in claimed]

        def finish(group: Group) -> None:
            self._client.hand_in(tasks.pop(group.ticket), group.samples)

        with self._world.phase("eval"):
            rollouts.answer_from(claim, finish, len(samplings))

    def _next(self) -> GeneratorTask:
        """[all] What the first rank finds; it waits where there is nothing to do."""
        found = None
        while self._world.rank == 0 and found is None:
            with self._world.journal.waiting(self._awaited):
                found = self._look()
        record = msgspec.to_builtins(found, builtin_types=(bytes,)) if found else None
        return msgspec.convert(self._world.broadcast("publish: newest version", record), GeneratorTask)  # [all]

    @property
    def _awaited(self) -> str:
        """What there is to wait for, in a hang report."""
        oldest = self._client.link.news.oldest
        return f"publish: version {oldest} from ranks that train" if self._met < oldest else "generate: something to do"

    def _announced(self) -> Announcement | None:
        newest = self._client.link.news.newest
        return msgspec.msgpack.decode(newest, type=Announcement) if newest else None

    def _look(self) -> GeneratorTask | None:
        """What there is to do now; pause if there is nothing.

        A newer version than all ranks have is held: training ranks keep it until it has been fetched.
        """
        link = self._client.link
        link.check()
        news, newest = link.news, self._announced()
        if newest and newest.version > self._met:
            if self._client.hold(newest.version):
                return GeneratorTask("load", newest.version, news.step, newest)
        elif news.asked:
            return GeneratorTask("eval", self._met, news.step)
        elif news.over:
            return GeneratorTask("over", 0, news.step)
        elif self._last_step < news.step <= self._cfg.steps and self._met >= news.oldest:
            return GeneratorTask("step", news.step, news.step)
        time.sleep(LOOK_SECONDS)
        link.wait()
        return None

    def _load(self, newest: Announcement) -> None:
        """[all] Fetch a version and give it to the engine, unless this replica took it in the middle of a step."""
        receiver, leads = self._receiver, self._receiver.replica.leads
        if leads:
            self._client.hold(newest.version)
        self._world.barrier("publish: all fetch")  # [all] the first rank holds it until then
        if newest.version > receiver.version:
            pieces = receiver.fetch(newest, self._client) if leads else None
            receiver.load(newest, pieces, self._client)  # [all] of the replica
        elif leads:
            self._client.release(newest.version)
