"""Memory of an engine on a rank, estimated from the model's shape."""

from dataclasses import dataclass
from typing import Any

import torch

from spmd_rl.config.schema import EngineConfig, PlanConfig, RlConfig
from spmd_rl.config.sections.models import ServedModelConfig
from spmd_rl.distributed.dtype import choose_dtype
from spmd_rl.model.moe import num_experts
from spmd_rl.model.size import ModelSize, num_kv_heads

STEP_TOKENS = 16384
"""Most prompt tokens in an engine's step on a device"""


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """Bytes of an engine on each rank."""

    weights: int
    kv: int
    working: int
    """rough bytes of a step: hidden states of the longest prompt, logits in float32, twice"""


NOTHING = EngineBytes(0, 0, 0)


def beside_training(cfg: RlConfig, size: ModelSize, config: Any) -> EngineBytes:
    """Return the engine's memory on a trainer rank."""
    apart = cfg.placement.is_split and not cfg.placement.is_lent
    return NOTHING if apart else engine_bytes(cfg.engine, size, config, dtype_of(cfg.policy, cfg.plan))


def dtype_of(policy: ServedModelConfig, plan: PlanConfig) -> str:
    """Return the dtype of a plan's policy by name; `auto` on the CPU is this machine's."""
    if policy.dtype != "auto":
        return policy.dtype
    return "bfloat16" if plan.device != "cpu" else choose_dtype(torch.device("cpu"))[0]


def engine_bytes(engine: EngineConfig, size: ModelSize, config: Any, dtype: str) -> EngineBytes:
    """Return an engine's memory. config: of the text model. dtype: of weights and cache."""
    width, tp = getattr(torch, dtype).itemsize, engine.tp
    # With latent attention each rank holds all of a token's latent vector, whatever `tp` is.
    if latent := getattr(config, "kv_lora_rank", None):
        kv = config.num_hidden_layers * (latent + config.qk_rope_head_dim)
    else:
        heads = num_kv_heads(config)
        # Ranks beyond the number of key-value heads hold copies of them, so the share is rounded up.
        kv = size.kv // heads * -(-heads // tp)
    units = config.intermediate_size
    if num_experts(config):
        units = config.moe_intermediate_size * config.num_experts_per_tok
    tokens = min(STEP_TOKENS, engine.kv_tokens)
    hidden = tokens * (4 * config.hidden_size + 3 * units // tp) * width
    logits = 2 * engine.max_running * config.vocab_size * torch.float32.itemsize
    # A stage has only some of the layers.
    kv = -(-kv // engine.pp)
    return EngineBytes(size.parameters * width // engine.ranks, engine.kv_tokens * kv * width, hidden + logits)
