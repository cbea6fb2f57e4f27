"""Construction of the native engine from settings."""

import torch

from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.models import ServedModelConfig
from spmd_rl.distributed import World
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.engine.sequence import text_of_model
from spmd_rl.model.constraint import constraint_of


def build(
    settings: EngineConfig, policy: ServedModelConfig, sleeps: bool, world: World, constraint: ConstraintConfig
) -> NativeEngine:
    """Return an engine of the policy's architecture and dtype on this rank's device, without weights."""
    trust = policy.trust_remote_code
    module = empty_module(policy.model, getattr(torch, policy.dtype), world.device, trust=trust)
    text_of = text_of_model(policy.model, trust)
    sizes, found = (settings.max_running, settings.kv_tokens), constraint_of(constraint, policy.model, trust)
    return NativeEngine(module, *sizes, sleeps, text_of, policy.router_replay, found)
