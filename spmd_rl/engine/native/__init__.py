"""The embedded engine: continuous batching over a Hugging Face module in the rank's own process.

The default, and the reference the other engines are tested against. One token per running request and step, paged KV
cache; what a prompt shares with another one, or with an earlier turn, is computed once. Left out: tensor parallelism,
sliding windows, chunked prefill, preemption.
"""

import torch

from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.models import ServedModelConfig
from spmd_rl.distributed import World
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.engine.sequence import text_of_model
from spmd_rl.errors import UserError
from spmd_rl.model.constraint import constraint_of

__all__ = ["NativeEngine", "build", "empty_module"]


def build(
    settings: EngineConfig, policy: ServedModelConfig, sleeps: bool, world: World, constraint: ConstraintConfig
) -> NativeEngine:
    """The policy's architecture in the policy's dtype, on this rank's device, without weights."""
    if settings.tp != 1:
        raise UserError(f"engine.tp: the native engine holds a whole copy per rank (tp=1), not tp={settings.tp}")
    trust = policy.trust_remote_code
    module = empty_module(policy.model, getattr(torch, policy.dtype), world.device, trust=trust)
    text_of = text_of_model(policy.model, trust)
    sizes, found = (settings.max_running, settings.kv_tokens), constraint_of(constraint, policy.model, trust)
    return NativeEngine(module, *sizes, sleeps, text_of, policy.router_replay, found, settings.drafts)
