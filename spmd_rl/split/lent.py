"""Ranks that are lent: they train, and generate with the others until the step's answers are there.

What ROLL calls partial overlap. Each takes part in a step when it comes back from the update before, and leaves when
the step has ended; what it has under way then is claimed by the ranks that stay.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from spmd_rl.config.schema import RlConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.engine import build as build_engine
from spmd_rl.engine.base import Engine
from spmd_rl.rollout import Collected, Rollouts, Sampling, Services
from spmd_rl.split.remote import RemoteRollouts
from spmd_rl.split.remote_step import RemoteWork
from spmd_rl.split.sides import TrainSide
from spmd_rl.types import Group, Prompt


class Lent:
    """Stateful, like `Rollouts`: a training rank's share of generation, and what other ranks hand in to it."""

    def __init__(
        self, engine: Engine, remote: RemoteRollouts, rollouts: Rollouts, held_out: Rollouts, work: RemoteWork
    ):
        """rollouts: with all ranks of the job. held_out: with those that train, who answer held-out prompts alone."""
        self.engine, self.remote = engine, remote
        self._rollouts, self._held_out, self._work = rollouts, held_out, work

    @classmethod
    @contextmanager
    def build(
        cls, cfg: RlConfig, remote: RemoteRollouts, services: Services, side: TrainSide, world: World
    ) -> Iterator["Lent"]:
        """[all] `world`: all ranks of the job, which also leave this together."""
        with world.phase("start"), world.journal.extend_timeout(cfg.journal.start_seconds):
            sleeps, constraint = cfg.train.offload, cfg.rollout.constraint
            engine = build_engine(cfg.engine, cfg.policy, sleeps, world, constraint)  # [all]
        work = RemoteWork(side.lent.client, leaves=True)
        parts = cfg.generation, engine, remote.source, services
        together = Rollouts(*parts, world, work)  # [all]
        with closing(together), closing(Rollouts(*parts, side.world)) as held_out:  # [all] that train
            together.check()
            yield cls(engine, remote, together, held_out, work)
            side.server.end()
            world.barrier("generate: last step")  # [all] one of them may keep the sidecar of the others
            engine.close()  # not with an exception pending: an engine's own groups may wait for other ranks

    @property
    def prompts(self) -> Prompts | EnvTasks:
        """What the tickets stand for."""
        return self.remote.prompts

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return self.remote.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`. UserError if the tickets would now stand for other prompts."""
        self.remote.load_state(state)

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] that train: see `Rollouts.answer`."""
        return self._held_out.answer(prompts, sampling)

    def collect(self, step: int) -> Collected:
        """[all] Generate with the others until the step has ended; what of it lies on this rank."""
        self._work.begin(step, lambda: step - 1)
        self._rollouts.generate_from(self._work, step)  # [all] of a replica
        return self.remote.collect(step)  # [all] that train
