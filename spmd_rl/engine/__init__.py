"""Engines: `build` gives the one that `engine=...` names. Each lives in the folder of its name."""

import importlib

from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.engine import ENGINES, EngineConfig
from spmd_rl.config.sections.models import ServedModelConfig
from spmd_rl.distributed import World
from spmd_rl.engine.base import Capacity, Engine

__all__ = ["Capacity", "Engine", "build"]


def build(
    settings: EngineConfig,
    policy: ServedModelConfig,
    sleeps: bool,
    world: World,
    constraint: ConstraintConfig = ConstraintConfig(),  # noqa: B008  none
) -> Engine:
    """[all] The engine of this rank, without weights yet: it refuses requests until the first publish.

    sleeps: its weights leave the device while it does not generate. constraint: what all its answers have to parse as.
    """
    return importlib.import_module(ENGINES[settings.name]).build(settings, policy, sleeps, world, constraint)
