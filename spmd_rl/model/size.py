"""`ModelSize`: counts that a model's arithmetic and memory traffic scale with."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from spmd_rl.config.architectures import STATES
from spmd_rl.model.moe import num_experts


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Counts of numbers, independent of dtype."""

    parameters: int
    read: int
    """Parameters that a decode step reads: all but a vision tower and an untied embedding table"""
    per_token: int
    """Parameters multiplied with each token: not the output embedding or unchosen experts"""
    head: int
    """Parameters of the output embedding, used only to predict tokens"""
    kv: int
    """KV cache numbers per token: 2 x attention layers x key-value heads x head dimension"""
    attention: int
    """Width of attention: attention layers x heads x head dimension"""

    @classmethod
    def of(cls, model: nn.Module) -> "ModelSize":
        """Return the size of an unsharded Hugging Face causal LM."""
        config = model.config.get_text_config()
        layers, heads, width = len(attention_layers(config)), config.num_attention_heads, head_dim(config)
        output, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        parameters = sum(p.numel() for p in model.parameters())
        tower = model.tower.parameters if hasattr(model, "tower") else ()
        read = parameters - (0 if output is table else table.numel()) - sum(p.numel() for p in tower)
        return cls(
            parameters=parameters,
            read=read,
            per_token=read - output.numel() - _idle(model),
            head=output.numel(),
            kv=2 * layers * num_kv_heads(config) * width,
            attention=layers * heads * width,
        )


def attention_layers(config: PreTrainedConfig) -> list[int]:
    """Return the layers with attention: all but a hybrid's with a state."""
    layers = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [number for number, kind in enumerate(layers) if kind not in STATES]


def head_dim(config: PreTrainedConfig) -> int:
    """Return a head's width, which older configurations lack."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Return the number of key-value heads, which older configurations lack."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _idle(model: nn.Module) -> int:
    config = model.config.get_text_config()
    experts = num_experts(config)
    if not experts:
        return 0
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return routed * (experts - config.num_experts_per_tok) // experts
