"""Tiny random models of every type of causal language model that the installed transformers has.

    config = small_config("olmo_hybrid")
    write("olmo_hybrid", path)

The config class's own defaults, but for sizes: what a layer computes is what the class says, not what we think of it.
"""

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST_WEIGHTS = 3 * 10**7
WIDTHS = dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "n_embed", "word_embed_proj_dim"), 64)
WIDTHS |= dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"), 96)
WIDTHS |= dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32)
WIDTHS |= {"shared_expert_intermediate_size": 48, "shared_intermediate_size": 48, "head_dim": 16, "rotary_dim": 8}
WIDTHS |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
WIDTHS |= {"qk_head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "index_head_dim": 16}
COUNTS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4
)
COUNTS |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
COUNTS |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
COUNTS |= dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "num_key_value_heads"), 2)
COUNTS |= {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "index_topk": 8}
COUNTS |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "index_n_heads": 2,
    "encoder_attention_heads": 4,
    "encoder_layers": 2,
}
COUNTS |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "block_size"), 512)
COUNTS |= {"vocab_size": 260, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = WIDTHS | COUNTS
NO_DEFAULT = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3_text": {"num_hidden_layers": 6},  # of which the last one sees everything
    **dict.fromkeys(("hunyuan_v1_dense", "ministral"), {"head_dim": 16}),
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": [2, 2, 2, 2]},
}
"""What some classes want to be told"""


def small_config(kind: str, **overrides: object) -> PreTrainedConfig:
    """A config of this type with small sizes, those of the models inside it included. Whatever its class raises."""
    cls = CONFIG_MAPPING[kind]
    default = cls()
    sizes = _sizes(default)
    if "kv_lora_rank" in sizes:  # latent attention shares no key-value heads
        sizes["num_key_value_heads"] = 4
    for name in getattr(cls, "sub_configs", {}):
        if isinstance(inner := getattr(default, name, None), PreTrainedConfig):
            sizes[name] = _sizes(inner)
    return cls(**{**sizes, **NO_DEFAULT.get(kind, {}), **overrides})


def _sizes(config: PreTrainedConfig) -> dict[str, object]:
    return {
        key: value
        for key, value in SMALL.items()
        if hasattr(config, key) and (getattr(config, key) is not None or key == "num_key_value_heads")
    }


def write(kind: str, path: Path, **overrides: object) -> None:
    """Save such a model with random weights, biases and norms: a mistake in any of them shows. Whatever it raises."""
    config = small_config(kind, **overrides)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size} weights: the sizes of {kind} have other names")
    model, generator = AutoModelForCausalLM.from_config(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.is_floating_point():
                is_norm, std = "norm" in name or "ln_" in name, 0.1 if weight.ndim == 1 else 0.08
                weight.copy_(torch.randn(weight.shape, generator=generator) * std + float(is_norm and weight.ndim == 1))
    model.save_pretrained(path)
