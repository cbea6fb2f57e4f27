"""What `config.json` says about whether a model can be trained here: told before torch, and before weights are fetched.

Training packs many sequences into one row and attends within each; whatever mixes tokens in another way is refused.
"""

import json
from pathlib import Path
from typing import Any

from spmd_rl.errors import UserError

NO_CAUSAL_LM = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
RECURRENT = "mamba mamba2 falcon_mamba jamba bamba zamba zamba2 rwkv recurrent_gemma qwen3_next nemotron_h lfm2"
REFUSED = {
    "gemma2": "caps its attention logits",
    "gpt_oss": "has attention sinks",
    **dict.fromkeys(("falcon", "bloom", "mpt"), "computes its attention by itself"),
    "granitemoe": "has experts of a kind of its own",
    **dict.fromkeys(RECURRENT.split(), "has recurrent layers"),
}
"""By `model_type`, why it cannot be trained"""
LOGIT_FACTORS = {"cohere": ("logit_scale", 1), "cohere2": ("logit_scale", 1), "granite": ("logits_scaling", -1)}
"""Types that multiply their logits by a number: the key of `config.json` that has it, and its exponent"""
SCALES_HIDDEN_STATES = (*LOGIT_FACTORS, "minicpm3")
"""Types whose own forward multiplies what comes out of the input embedding, or goes into the output embedding"""
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
SLIDING = ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "cohere2", "olmo3", "exaone4")
"""Types some of whose layers see only a window, even where `config.json` does not say it"""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of which one says how many experts each layer of a mixture has"""
WORKING = "Llama, Qwen2, Qwen3, Mistral, Mixtral, Phi, OLMo2, Gemma, GPT-2 and OPT"


def experts_in(folder: Path) -> int | None:
    """Return how many experts each layer of the model in `folder` has, 0 if it is no mixture; None if that is unknown.

    A directory without a readable `config.json` is for others to refuse.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        text: dict[str, Any] = config.get("text_config") or config
    except (OSError, ValueError, AttributeError):
        return None
    return next((count for name in EXPERT_COUNTS if (count := text.get(name))), 0)


def check_architecture(key: str, folder: Path, engine: str, longest: int) -> None:
    """Raise a `UserError` if the model in `folder` cannot be trained, or cannot be run by `engine` (may be empty).

    `longest` is the most tokens of a sample. `key` is the setting that the error names.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        text: dict[str, Any] = config.get("text_config") or config
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{key}: {folder / 'config.json'}: {error}") from None
    pad, size = text.get("pad_token_id"), text.get("vocab_size")
    if isinstance(pad, int) and isinstance(size, int) and pad >= size:
        raise UserError(f"{key}: {folder / 'config.json'}: pad_token_id {pad} is outside of the vocabulary of {size}")
    kind = text.get("model_type") or config.get("model_type") or "this model"
    names = config.get("architectures") or []
    if config.get("is_encoder_decoder") or any(name.endswith(NO_CAUSAL_LM) for name in names):
        raise UserError(f"{key}: {folder} is no causal language model but {', '.join(names) or kind}")
    reason = REFUSED.get(kind) or ("caps its attention logits" if text.get("attn_logit_softcapping") else "")
    reason = reason or ("caps its logits" if text.get("final_logit_softcapping") else "")
    if kind not in SCALES_HIDDEN_STATES and any(text.get(key, 1) != 1 for key in SCALES):
        reason = reason or "scales its logits"
    if reason:
        raise UserError(f"{key}: {kind} {reason} and cannot be trained here; {WORKING} can, Gemma 3 with engine=vllm")
    layers = {*(text.get("layer_types") or ())} - {"full_attention"}
    if engine == "native" and (layers or kind in SLIDING or text.get("sliding_window_pattern")):
        what = ", ".join(sorted(layers)) or "sliding_attention"
        raise UserError(f"{key}: engine=native cannot run the {what} layers of {kind}; engine=vllm can")
    if engine == "native" and text.get("kv_lora_rank"):
        raise UserError(f"{key}: engine=native cannot run the latent attention of {kind}; engine=vllm can")
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    if window and longest > window:
        raise UserError(
            f"{key}: samples of {longest} tokens exceed the sliding window of {kind}, which training has not: set "
            f"rollout.max_prompt_tokens and rollout.max_new_tokens to {window} together"
        )
