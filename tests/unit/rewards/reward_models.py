"""Tiny sequence classification models: `random_model` as it comes, `looks_for_a_four` with weights chosen by hand."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from tests.models import tokenizer

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_labels": 1,
    "pad_token_id": 256,
}


def random_model(path: Path, seed: int = 0, **overrides: object) -> Path:
    """Two layers of Qwen3, the score's head far from zero."""
    torch.manual_seed(seed)
    config = Qwen3Config(**{**SIZES, "head_dim": 16, "num_hidden_layers": 2, **overrides})
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    return saved(model, path)


def looks_for_a_four(path: Path) -> Path:
    """1 for a text that ends with a 4, else 0: the last token's embedding is all there is."""
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_hidden_layers=0))
    words = tokenizer()
    words.chat_template = "{{ messages[-1]['content'] }}"
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[words("4")["input_ids"]] = 1024.0
        model.score.weight.fill_(1 / 64)
    return saved(model, path, words)


def saved(model: torch.nn.Module, path: Path, words=None) -> Path:
    model.save_pretrained(path)
    (words or tokenizer()).save_pretrained(path)
    return path
