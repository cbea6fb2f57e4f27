"""Ranks that are lent: they train, and generate with the others until the step's answers are there.

What ROLL calls partial overlap. Ranks join and leave a step by themselves: each takes part in generating it when it
comes back from the update before, and leaves when the step has ended; what it has under way then is claimed by the
ranks that stay.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from spmd_rl.config.schema import PipelineConfig
from spmd_rl.data import EnvTasks, Prompts
from spmd_rl.distributed import World
from spmd_rl.engine import Engine
from spmd_rl.engine import build as build_engine
from spmd_rl.rollout import Collected, Rollouts, Sampling, Services, check_errors
from spmd_rl.split.handed_over import take_step
from spmd_rl.split.sides import TrainSide
from spmd_rl.types import Group, Prompt


class Lent:
    """Stateful, like `Rollouts`: a training rank's share of generation, and what other ranks hand over to it."""

    def __init__(
        self, cfg: PipelineConfig, engine: Engine, rollouts: Rollouts, held_out: Rollouts, side: TrainSide
    ) -> None:
        """rollouts: with all ranks of the job, which this one leaves between two steps.

        held_out: with those that train, who answer held-out prompts while the others generate.
        """
        self.engine = engine
        self._cfg, self._rollouts, self._held_out, self._side = cfg, rollouts, held_out, side

    @classmethod
    @contextmanager
    def build(
        cls,
        cfg: PipelineConfig,
        prompts: Prompts | EnvTasks,
        services: Services,
        side: TrainSide,
        world: World,
    ) -> Iterator["Lent"]:
        """[all] `world`: all ranks of the job, which also leave this together."""
        with world.phase("start"), world.journal.extend_timeout(cfg.journal.start_seconds):
            engine = build_engine(cfg.engine, cfg.policy, cfg.train.offload, world)  # [all]
        parts = cfg.generation, engine, prompts, services
        together = Rollouts(*parts, world, side.world.rank, side.handover)  # [all]
        with closing(together), closing(Rollouts(*parts, side.world)) as held_out:  # [all] that train
            together.check()
            yield cls(cfg, engine, together, held_out, side)
            world.barrier("generate: last step")  # [all] one of them may keep the sidecar of the others
            engine.close()  # not with an exception pending: an engine's own groups may wait for other ranks

    @property
    def prompts(self) -> Prompts | EnvTasks:
        """What the tickets stand for."""
        return self._rollouts.prompts

    def state(self) -> dict[str, Any]:
        """See `checkpoint.Stateful`."""
        return self._rollouts.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """See `checkpoint.Stateful`. UserError if the tickets would now stand for other prompts."""
        self._rollouts.load_state(state)

    def answer(self, prompts: Sequence[Prompt], sampling: Sequence[Sampling]) -> list[Group]:
        """[all] that train: see `Rollouts.answer`."""
        return self._held_out.answer(prompts, sampling)

    def collect(self, step: int) -> Collected:
        """[all] Generate with the others until the step has ended; what of it lies on this rank."""
        collected, _ = self._rollouts.generate(step)  # [all] of the job
        world = self._side.world
        arrived = take_step(step, self._side.exchange, self._side.senders, world)  # [all] that train
        with world.phase("coordination"):
            collected = collected.with_slices(arrived.finished)
        pace = arrived.pace(collected, self._cfg.placement.swap, world)  # [all] that train
        return check_errors(
            replace(collected, pace=pace), self._cfg.reward, self._cfg.rollout, world
        )  # [all] that train
