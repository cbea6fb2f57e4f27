"""Tiny random model directories for tests: `tiny("llama" | "qwen2" | "qwen3", path)`. No download, about 0.1 s each.

Hidden 64, 2 layers, 4 heads over 2 key-value heads, vocabulary 260: 256 bytes, then `<|pad|>`, `<|im_start|>`,
`<|im_end|>` (end of sequence) and `<|endoftext|>`.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

KINDS = ("llama", "qwen2", "qwen3")
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "cohere": (CohereConfig, CohereForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
}
"""For `tiny`: mixtures of four experts."""
HYBRID = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""For `tiny`: Qwen3.5's text model with three layers that carry a state, and one with attention."""
SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
SPECIAL_IDS = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny(kind: str, path: Path | str, seed: int = 0, tie: bool = False, **overrides: object) -> Path:
    """Write a tiny random model with its tokenizer; the same (kind, seed, overrides) gives the same weights.

    `overrides` go to the model's config (`num_hidden_layers=4`, ...). Returns `path` as a Path.
    """
    config_class, model_class = FAMILIES[kind]
    sizes = {**SIZES, "vocab_size": 260, "head_dim": 16, **SPECIAL_IDS}
    config = config_class(**{**sizes, "tie_word_embeddings": tie, **overrides})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config)
    for name, weight in model.named_parameters():  # biases and norms start at 0 and 1: a mistake there would not show
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.1)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            torch.nn.init.normal_(buffer, std=0.1)
    torch.random.set_rng_state(state)
    path = Path(path)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    out = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    out.chat_template = CHAT
    return out
