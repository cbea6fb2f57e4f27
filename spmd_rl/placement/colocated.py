"""`placement.mode=colocated` and `overlapped`: every rank trains and generates, in turns."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any

from spmd_rl import engine, train, weights
from spmd_rl.job import Job, Place
from spmd_rl.rollout import Collected, Rollouts


class RolloutsAhead(Rollouts):
    """The answers of the next step are generated before the update, during which their verdicts come in."""

    def __init__(self, last_step: int, *args: Any) -> None:
        """[all] See `Rollouts`. After `last_step` nothing is begun."""
        super().__init__(*args)  # [all]
        self._last_step = last_step

    def collect(self, step: int) -> Collected:
        """[all] Collect what was begun of this step and what its verdicts ask for, then begin the next step."""
        collected = super().collect(step)  # [all]
        if step < self._last_step and not collected.failure:
            self.begin(step + 1)  # [all] by the policy that is about to be updated: one version behind
        return collected


@contextmanager
def colocated(job: Job, make: Callable[..., Rollouts] = Rollouts) -> Iterator[Place]:
    """[all] The roles and the engine of each rank take turns on its device."""
    cfg, world = job.cfg, job.world
    job.open_run(world)  # [all]
    with job.starting():
        scorer, environments = job.connect(cfg.debug)
        roles = train.build_roles(cfg.roles, world)  # [all]
        generator = engine.build(cfg.engine, cfg.policy, cfg.train.offload, world)  # [all]
    publish = weights.build(roles.policy, generator, world, cfg.publish.probe_every)
    parts = cfg, generator, job.source, scorer, job.tokenizer, world, job.episode, environments
    rollouts = job.stack.enter_context(closing(make(*parts)))  # [all]
    yield Place(None, world, roles, rollouts, publish, environments, lambda start: rollouts.check())
    generator.close()  # not with an exception pending: an engine's own groups may wait for other ranks


def overlapped(job: Job) -> AbstractContextManager[Place]:
    """[all] As `colocated`, with the answers of a step generated while the step before is judged and learned."""
    return colocated(job, partial(RolloutsAhead, job.cfg.steps))
