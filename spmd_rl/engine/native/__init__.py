"""The embedded engine: continuous batching over a Hugging Face module in the rank's own process.

The default, and the reference the other engines are tested against. One token per running request and step, paged KV
cache; what a prompt shares with another one, or with an earlier turn, is computed once. Left out: tensor parallelism,
sliding windows, chunked prefill, preemption.
"""

from typing import TYPE_CHECKING

import torch

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.engine.answer import text_of_model
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.errors import UserError

if TYPE_CHECKING:
    from spmd_rl.distributed import World

__all__ = ["NativeEngine", "build", "empty_module"]


def build(cfg: RlvrConfig, world: "World") -> NativeEngine:
    """The policy's architecture in the policy's dtype, on this rank's device, without weights."""
    if cfg.engine.tp != 1:
        raise UserError(f"engine.tp: the native engine holds a whole copy per rank (tp=1), not tp={cfg.engine.tp}")
    dtype = getattr(torch, cfg.policy.dtype)
    module = empty_module(cfg.policy.model, dtype, world.device, trust=cfg.policy.trust_remote_code)
    text_of = text_of_model(cfg.policy.model, cfg.policy.trust_remote_code)
    return NativeEngine(
        module, cfg.engine.max_running, cfg.engine.kv_tokens, cfg.train.offload, text_of, cfg.policy.router_replay
    )
