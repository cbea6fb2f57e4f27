"""Qwen3: queries and keys are normalised."""

from typing import Any

from spmd_rl.train.megatron.architectures import llama
from spmd_rl.train.megatron.architectures.llama import LAYER, STORED
from spmd_rl.train.megatron.mapping import Whole

NORMS = {
    f"{LAYER}self_attention.q_layernorm.weight": Whole(f"{STORED}self_attn.q_norm.weight"),
    f"{LAYER}self_attention.k_layernorm.weight": Whole(f"{STORED}self_attn.k_norm.weight"),
}
NAMES = llama.NAMES | NORMS


def options(config: Any) -> dict[str, Any]:
    """Return the `TransformerConfig` fields that differ from Llama's."""
    return {"qk_layernorm": True}
