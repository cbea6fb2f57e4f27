"""Llama: the mapping from which other architectures are derived."""

from typing import Any

from spmd_rl.train.megatron.mapping import Columns, Heads, Rule, Stacked, Whole

LAYER, STORED = "decoder.layers.{}.", "model.layers.{}."
ATTENTION: dict[str, Rule] = {
    f"{LAYER}input_layernorm.weight": Whole(f"{STORED}input_layernorm.weight"),
    f"{LAYER}self_attention.linear_qkv.weight": Heads(*(f"{STORED}self_attn.{x}_proj.weight" for x in "qkv")),
    f"{LAYER}self_attention.linear_proj.weight": Columns(f"{STORED}self_attn.o_proj.weight"),
    f"{LAYER}pre_mlp_layernorm.weight": Whole(f"{STORED}post_attention_layernorm.weight"),
}
MLP: dict[str, Rule] = {
    f"{LAYER}mlp.linear_fc1.weight": Stacked(f"{STORED}mlp.gate_proj.weight", f"{STORED}mlp.up_proj.weight"),
    f"{LAYER}mlp.linear_fc2.weight": Columns(f"{STORED}mlp.down_proj.weight"),
}
AROUND: dict[str, Rule] = {
    "embedding.word_embeddings.weight": Stacked("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": Whole("model.norm.weight"),
    "output_layer.weight": Stacked("lm_head.weight"),
}
NAMES = AROUND | ATTENTION | MLP


def options(config: Any) -> dict[str, Any]:
    """Return the `TransformerConfig` fields that differ from Llama's. config: of transformers."""
    return {}
