"""Multi-latent attention: Megatron's `MLASelfAttention`, with three parts of our own.

    make_ours(chunk, config)
    chunk.decoder.layers[0].self_attention.rotary_pos_emb = LatentRotary(...)

Where Megatron's local layers make a latent, each rank that shares a layer out has some of its columns, and all of them
are gathered over a group of Megatron's global state, which there is none of here. As with Transformer Engine, ours are
made whole, by each rank of its own tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

if not isinstance(multi_latent_attention.TELinear, type):  # no Transformer Engine; Megatron asks for its classes
    multi_latent_attention.HAVE_TE = False
NORM_EPS = 1e-6
"""That of the norms of latents in transformers, whatever a model's other norms have"""


class Down(nn.Module):
    """In place of a linear layer that makes latents."""

    def __init__(self, config: MLATransformerConfig, num_rows: int, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(num_rows, config.hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # its gradient is a term of a sum over ranks

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[t / tp, 1, hidden size] -> [t / tp, 1, num_rows], and no bias."""
        return F.linear(x, self.weight), None


def make_ours(chunk: GPTModel, config: MLATransformerConfig) -> None:
    """Replace what a chunk's layers have of these parts."""
    for attention in (layer.self_attention for layer in chunk.decoder.layers):
        like = attention.linear_proj.weight
        attention.linear_q_down_proj = Down(config, config.q_lora_rank, like)
        attention.linear_kv_down_proj = Down(config, config.kv_lora_rank + config.qk_pos_emb_head_dim, like)
        attention.q_layernorm.eps = attention.kv_layernorm.eps = NORM_EPS
