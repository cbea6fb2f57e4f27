"""Trainable model types, by `config.json`: checked before torch, and before weights are fetched.

A model that mixes packed sequences would silently train on wrong logprobs. So types are listed once tested:
`tests/dist/test_architectures.py` compares packed logprobs, gradients and weights with plain transformers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError

FULL = (
    "apertus arcee axk1 cohere deepseek_v2 deepseek_v3 diffllama ernie4_5 ernie4_5_moe flex_olmo gemma glm glm4 "
    "glm4_moe glm4_moe_lite gpt2 gpt_bigcode granite helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 jais2 "
    "jetmoe llama longcat_flash minicpm3 minimax_m2 ministral3 mistral mixtral olmo olmo2 olmoe opt persimmon phi3 "
    "phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 youtu"
)
"""Trainable types (`model_type`); a window, if any, is that of all layers"""
SLIDING = {"afmoe": 1024, "cohere2": 4096, "cwm": 8192, "dots1": 4096, "exaone4": 4096, "exaone_moe": 4096}
SLIDING |= {"gemma3_text": 4096, "laguna": 512, "mellum": 1024, "ministral": 4096, "olmo3": 4096}
"""Further types whose layers partly see a window even if `config.json` has none, with its default"""
HYBRID = ("lfm2", "lfm2_moe", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Further types whose layers partly carry a state (`model/hybrid.py`)"""
ACCEPTED = sorted([*FULL.split(), *SLIDING, *HYBRID])
"""All trainable types. A new one needs its name above and a passing test"""
SEEING = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Trainable types with pictures; language models are of the types above or their own"""
UNLESS_ASKED = ("qwen2", "qwen2_moe", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl", "smollm3")
"""Types with a window only under `use_sliding_window`"""
WINDOWS = {**SLIDING, **dict.fromkeys(("mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), 4096)}
LAYERS = {"full_attention", "sliding_attention"}
STATES = {"linear_attention", "conv"}
"""Layer types of hybrid models that carry a state"""
POSITIONS = {**dict.fromkeys(("default", "linear", "llama3", "yarn"), ""), "dynamic": "max_position_embeddings"}
POSITIONS |= dict.fromkeys(("longrope", "su"), "original_max_position_embeddings")
"""Rotary positions that a model may have; a sequence longer than the key's value changes its neighbours' positions"""
REASONS = {
    "has layers whose state carries over from one sequence to the next": (
        "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear mamba mamba2 minimax nemotron_h "
        "recurrent_gemma rwkv xlstm zamba zamba2 zaya"
    ),
    "caps its attention logits": "gemma2 vaultgemma",
    "scales its logits": "cohere2_moe hyperclovax",
    "has attention sinks": "deepseek_v4 gpt_oss granite_swa granitemoe_swa mimo_v2_flash",
    "chooses which tokens to attend to": "axk2 deepseek_v32 doge glm_moe_dsa hy_v4 minimax_m3_vl_text",
    "attends in chunks": "llama4 llama4_text",
    "has its own attention code": (
        "bloom codegen falcon gpt_neo gpt_neox_japanese gptj mpt nemotron openai-gpt stablelm xglm"
    ),
    "has an output embedding with a bias": "phi",
    "has its own kind of experts": "granitemoe granitemoeshared",
    "cannot be loaded in shards": "biogpt gpt_neox",
}
"""Reasons why other types cannot be trained, if known"""
NO_CAUSAL_LM = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
REWARD_MODEL = "ForSequenceClassification"
"""Architecture that only a critic may start from"""
LOGIT_FACTORS = {"cohere": ("logit_scale", 1), "cohere2": ("logit_scale", 1), "granite": ("logits_scaling", -1)}
"""Types that scale logits: key of `config.json`, and exponent"""
SCALES_HIDDEN_STATES = (*LOGIT_FACTORS, "afmoe", "minicpm3", "olmo")
"""Types that scale the input embedding's output, or the output embedding's input"""
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys for the number of experts per mixture layer"""


def experts_in(folder: Path) -> int | None:
    """Return the experts per layer of the model in `folder`, 0 without a mixture; None if unknown."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        text: dict[str, Any] = config.get("text_config") or config
    except (OSError, ValueError, AttributeError):
        return None
    return next((count for name in EXPERT_COUNTS if (count := text.get(name))), 0)


def sees_pictures(folder: Path) -> bool:
    """Return True if the model in `folder` takes pictures."""
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type") in SEEING
    except (OSError, ValueError, AttributeError):
        return False


def check_architecture(key: str, folder: Path, longest: int, is_critic: bool = False) -> None:
    """Raise a `UserError`, naming the setting `key`, if the model in `folder` cannot be trained.

    longest: most tokens of a sample.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        kind, names = config.get("model_type") or "this model", config.get("architectures") or []
        if kind in SEEING:
            config |= config.pop("text_config", {})
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{key}: {folder / 'config.json'}: {error}") from None
    pad, size = config.get("pad_token_id"), config.get("vocab_size")
    # A padding id outside of the vocabulary would index past the embedding.
    if isinstance(pad, int) and isinstance(size, int) and pad >= size:
        raise UserError(f"{key}: {folder / 'config.json'}: pad_token_id {pad} is outside of the vocabulary of {size}")
    others = tuple(name for name in NO_CAUSAL_LM if name != REWARD_MODEL or not is_critic)
    if config.get("is_encoder_decoder") or any(name.endswith(others) for name in names):
        raise UserError(f"{key}: {folder} is not a causal language model but {', '.join(names) or kind}")
    if reason := next(_reasons(kind, config), None):
        raise UserError(
            f"{key}: {kind} {reason} and cannot be trained here; these can: {', '.join(sorted([*ACCEPTED, *SEEING]))}"
        )
    for what, limit in _limits(kind, config):
        if longest > limit:
            raise UserError(
                f"{key}: samples of {longest} tokens exceed {what}: set "
                f"rollout.max_prompt_tokens and rollout.max_new_tokens to {limit} together"
            )


def has_windows(config: dict[str, Any]) -> bool:
    """Return True if some layers have a sliding window."""
    layers = config.get("layer_types") or (["sliding_attention"] if config.get("model_type") in SLIDING else ())
    return "sliding_attention" in layers


def _reasons(kind: str, config: dict[str, Any]) -> Iterator[str]:
    yield from (reason for reason, kinds in REASONS.items() if kind in kinds.split())
    if "text_config" in config:
        yield "has other parts than a language model"
    if kind in SEEING and (inner := config["model_type"]) not in (*ACCEPTED, kind, f"{kind}_text"):
        yield f"has a language model of the type {inner}"
    if kind not in (*ACCEPTED, *SEEING):
        yield "is not known to keep packed sequences apart"
    if other := {*map(str, config.get("layer_types") or ())} - LAYERS - (STATES if kind in HYBRID else set()):
        yield f"has {', '.join(sorted(other))} layers"
    # Unknown rotary positions may depend on the whole row instead of each packed sequence.
    seen = {"mrope"} if kind in SEEING else set()
    if other := {name for name, _ in _positions(config)} - {*POSITIONS} - seen:
        yield f"has rotary positions of the type {', '.join(sorted(other))}"
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        yield "attends in both directions"
    if config.get("attn_logit_softcapping"):
        yield "caps its attention logits"
    if config.get("final_logit_softcapping"):
        yield "caps its logits"
    if kind not in LOGIT_FACTORS and any(config.get(name, 1) != 1 for name in SCALES):
        yield "scales its logits"


def _limits(kind: str, config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    asked, layers = config.get("use_sliding_window", kind not in UNLESS_ASKED), config.get("layer_types")
    slides = asked and not (kind in SLIDING and layers and "sliding_attention" not in layers)
    if slides and (window := config.get("sliding_window", WINDOWS.get(kind))):
        yield f"the sliding window of {kind}, which training does not support", window
    for name, settings in _positions(config):
        if where := POSITIONS.get(name):
            limit = config.get(where) or settings.get(where) or config.get("max_position_embeddings") or 0
            yield f"the length up to which the {name} positions of {kind} do not depend on other sequences", limit


def _positions(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = [settings for key in ("rope_parameters", "rope_scaling") if isinstance(settings := config.get(key), dict)]
    found += [value for settings in found for value in settings.values() if isinstance(value, dict)]
    return [(settings.get("rope_type") or settings.get("type") or "default", settings) for settings in found]
