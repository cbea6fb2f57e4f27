"""Qwen2 and Qwen2.5: queries, keys and values have a bias."""

from typing import Any

from spmd_rl.train.megatron.architectures import llama
from spmd_rl.train.megatron.architectures.llama import LAYER, STORED
from spmd_rl.train.megatron.mapping import Heads

NAMES = llama.NAMES | {
    f"{LAYER}self_attention.linear_qkv.bias": Heads(*(f"{STORED}self_attn.{x}_proj.bias" for x in "qkv")),
}


def options(config: Any) -> dict[str, Any]:
    """Return the `TransformerConfig` fields that differ from Llama's."""
    return {"add_qkv_bias": True}
