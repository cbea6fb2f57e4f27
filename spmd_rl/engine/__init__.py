"""Engines, one folder each; `build` makes the one of `engine=...`. Torch-free until it builds."""

from typing import TYPE_CHECKING

from spmd_rl.base.waits import waiting
from spmd_rl.config.engines import facts_of
from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.models import ServedModelConfig

if TYPE_CHECKING:
    from spmd_rl.distributed import World
    from spmd_rl.engine.base import Engine


def build(
    settings: EngineConfig,
    policy: ServedModelConfig,
    sleeps: bool,
    world: "World",
    constraint: ConstraintConfig = ConstraintConfig(),  # noqa: B008  none
) -> "Engine":
    """[all] Return this rank's engine, which refuses requests until the first publish.

    sleeps: offload idle weights. constraint: grammar of all answers.
    """
    facts = facts_of(settings.name)
    facts.check_package()
    facts.check_settings(settings)
    with waiting("starting the engine", world.rank == 0):
        return facts.build(settings, policy, sleeps, world, constraint)  # [all]
