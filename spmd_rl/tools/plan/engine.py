"""What an engine holds on a rank, reckoned from the model's shape: it allocates by itself, and is not traced."""

from dataclasses import dataclass
from typing import Any

import torch

from spmd_rl.config.schema import EngineConfig, PolicyConfig, RlConfig
from spmd_rl.model.moe import num_experts
from spmd_rl.model.size import ModelSize, num_kv_heads

STEP_TOKENS = 16384
"""Tokens of prompts that a step of an engine computes at most on a device."""


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """Bytes on each rank of a replica."""

    weights: int
    kv: int
    """the cache of keys and values"""
    working: int
    """a rough measure of what a step computes with: hidden states of the longest prompt, logits in float32, twice"""


NOTHING = EngineBytes(0, 0, 0)


def beside_training(cfg: RlConfig, size: ModelSize, config: Any) -> EngineBytes:
    """What the engine holds on a rank that trains: nothing where other ranks generate."""
    apart = cfg.placement.is_split and not cfg.placement.is_lent
    return NOTHING if apart else engine_bytes(cfg.engine, size, config, dtype_of(cfg.policy))


def dtype_of(policy: PolicyConfig) -> str:
    """In which the engine holds its weights."""
    return "bfloat16" if policy.dtype == "auto" else policy.dtype


def engine_bytes(engine: EngineConfig, size: ModelSize, config: Any, dtype: str) -> EngineBytes:
    """config: of the text model. dtype: of weights and cache."""
    width, tp = getattr(torch, dtype).itemsize, engine.tp
    if latent := getattr(config, "kv_lora_rank", None):  # each rank has all of a token's latent vector
        kv = config.num_hidden_layers * (latent + config.qk_rope_head_dim)
    else:
        heads = num_kv_heads(config)
        kv = size.kv // heads * -(-heads // tp)
    units = config.intermediate_size
    if num_experts(config):
        units = config.moe_intermediate_size * config.num_experts_per_tok
    tokens = min(STEP_TOKENS, engine.kv_tokens)
    hidden = tokens * (4 * config.hidden_size + 3 * units // tp) * width
    logits = 2 * engine.max_running * config.vocab_size * torch.float32.itemsize
    kv = -(-kv // engine.pp)  # of a stage, which has some of the layers
    return EngineBytes(size.parameters * width // engine.ranks, engine.kv_tokens * kv * width, hidden + logits)
