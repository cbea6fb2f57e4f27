"""The engine's module: a Hugging Face causal LM with paged attention and unset weights."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.config.architectures import STATES
from spmd_rl.engine.native.attention import ATTENTION
from spmd_rl.model.build import (
    auto_class,
    build_parts,
    keep_float32,
    materialize,
    parameters_on_meta,
    with_tower_attention,
)


def empty_module(
    path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu", trust: bool = False
) -> nn.Module:
    """Return a module from `path/config.json`, with correct buffers and uninitialised weights. UserError for an
    unsupported architecture."""
    # Buffers (rotary frequencies) are computed on the CPU, as in the trainer: a device's would differ in the last bit.
    folder = model_folder(path)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    _check(config.get_text_config())
    attention = with_tower_attention(folder, ATTENTION)
    with parameters_on_meta(), no_init_weights():
        module = auto_class(folder).from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust
        )
    keep_float32(module)
    materialize(module, torch.device(device))
    module.tie_weights()
    return build_parts(module.requires_grad_(False), folder)


# The first attends twice in a layer; the others' heads are not those that the cache has room for.
FOREIGN = ("diffllama", "gpt_bigcode", "jetmoe")


def _check(config: PreTrainedConfig) -> None:
    if config.model_type in FOREIGN:
        raise UserError(f"policy.model: engine=native cannot run the attention of {config.model_type}")
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    foreign = sorted({*layers} - {"full_attention", *STATES})
    if foreign:
        raise UserError(f"policy.model: engine=native cannot run {', '.join(foreign)} layers ({config.model_type})")
    if getattr(config, "kv_lora_rank", None):
        raise UserError(f"policy.model: engine=native cannot run latent attention ({config.model_type})")
