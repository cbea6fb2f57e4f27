"""Small random vision-language models for tests: `toy_vlm("qwen2_5_vl" | "qwen3_vl" | "smolvlm", path)`.

No download. The tokenizer is that of `tests.models` with the tokens of pictures; the chat template shows pictures where
a message's content has `{"type": "image"}` parts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from spmd_rl.model.pictures import TRANSFORMERS
from tests.models import SIZES, SPECIAL_IDS, tokenizer

VLM_KINDS = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SMOL_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
QWEN_PICTURE, SMOL_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>", "<image>"
CHAT = (
    "{{% for m in messages %}}<|im_start|>{{{{ m['role'] }}}}\n"
    "{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}{{% for part in m['content'] %}}"
    "{{% if part['type'] == 'image' %}}{picture}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)


def toy_vlm(kind: str, path: Path | str, seed: int = 0, tower: dict[str, Any] | None = None, **text: Any) -> Path:
    """Write a random model with its tokenizer and image processor; equal arguments give equal weights.

    `text` and `tower` replace values of the language model's and the vision tower's configs. Returns `path` as a Path.
    """
    if Version(transformers.__version__) < TRANSFORMERS:
        pytest.skip(f"transformers is older than {TRANSFORMERS}, which pictures need")
    tokens = vlm_tokenizer(kind)
    sizes = {**SIZES, **SPECIAL_IDS, "vocab_size": len(tokens), **text}
    build = {"qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "smolvlm": _smol}[kind]
    model_class, config, picture_config = build(tokens, sizes, tower or {})
    config.update(SPECIAL_IDS)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config)
    # Biases and norms start at 0 and 1: a mistake there would not show.
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.1)
    torch.random.set_rng_state(state)
    path = Path(path)
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(picture_config))
    if kind == "smolvlm":
        (path / "processor_config.json").write_text(
            json.dumps({"processor_class": "SmolVLMProcessor", "image_seq_len": 4})
        )
    return path


def vlm_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer with the tokens of pictures of this kind of model."""
    out = tokenizer()
    out.add_special_tokens({"additional_special_tokens": list(SMOL_TOKENS if kind == "smolvlm" else QWEN_TOKENS)})
    out.chat_template = CHAT.format(picture=SMOL_PICTURE if kind == "smolvlm" else QWEN_PICTURE)
    return out


def _ids(tokens: PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, tokens.convert_tokens_to_ids(list(QWEN_TOKENS)), strict=True))


def _qwen_pictures(name: str, patch: int) -> dict[str, Any]:
    cell = 2 * patch
    return {
        "processor_class": name,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": cell**2, "longest_edge": 64 * cell**2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def _qwen2_5(tokens: PreTrainedTokenizerFast, text: dict[str, Any], tower: dict[str, Any]) -> tuple:
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1],
        "patch_size": 14,
        "window_size": 56,
    }
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config={**vision, **tower}, **_ids(tokens)
    )
    return Qwen2_5_VLForConditionalGeneration, config, _qwen_pictures("Qwen2_5_VLProcessor", 14)


def _qwen3(tokens: PreTrainedTokenizerFast, text: dict[str, Any], tower: dict[str, Any]) -> tuple:
    head = text.pop("head_dim", text["hidden_size"] // text["num_attention_heads"])
    sections = [head // 2 - 2 * (head // 6), head // 6, head // 6]
    rope = {
        "rope_type": "default",
        "mrope_section": sections,
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "patch_size": 16,
    }
    config = Qwen3VLConfig(
        text_config={**text, "head_dim": head, "rope_parameters": rope},
        vision_config={**vision, **tower},
        **_ids(tokens),
    )
    return Qwen3VLForConditionalGeneration, config, _qwen_pictures("Qwen3VLProcessor", 16)


def _smol(tokens: PreTrainedTokenizerFast, text: dict[str, Any], tower: dict[str, Any]) -> tuple:
    # A picture is scaled to 64 x 64 pixels and cut into four of 32 x 32, with the whole as a fifth; each of them is
    # (32 / 8) ** 2 patches, of which 2 x 2 become one token.
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = SmolVLMConfig(
        text_config={"model_type": "llama", **text},
        vision_config={**vision, **tower},
        scale_factor=2,
        image_token_id=tokens.convert_tokens_to_ids("<image>"),
        pad_token_id=text["pad_token_id"],
    )
    pictures = {
        "processor_class": "SmolVLMProcessor",
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_image_splitting": True,
    }
    return SmolVLMForConditionalGeneration, config, pictures
