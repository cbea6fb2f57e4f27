"""Engines: `build` gives the one that `engine=...` names. Each lives in the folder of its name."""

import importlib
from typing import TYPE_CHECKING

from spmd_rl.config.sections.models import EngineConfig, ServedModelConfig
from spmd_rl.engine.base import Capacity, Engine
from spmd_rl.errors import UserError

if TYPE_CHECKING:
    from spmd_rl.distributed import World

__all__ = ["ENGINES", "Capacity", "Engine", "build"]

ENGINES = {"native": "spmd_rl.engine.native", "vllm": "spmd_rl.engine.vllm"}
"""name -> the module whose `build` makes it; imported only when chosen."""


def build(settings: EngineConfig, policy: ServedModelConfig, sleeps: bool, world: "World") -> Engine:
    """[all] The engine of this rank, without weights yet: it refuses requests until the first publish.

    sleeps: its weights leave the device while it does not generate.
    """
    if settings.name not in ENGINES:
        raise UserError(f"engine.name: unknown engine '{settings.name}'; known: {', '.join(sorted(ENGINES))}")
    return importlib.import_module(ENGINES[settings.name]).build(settings, policy, sleeps, world)
