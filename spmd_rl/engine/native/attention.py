"""Attention over the paged cache, called by the module's layers.

Registered with transformers under `ATTENTION`; for a name without a mask function models build no mask. Every layer
gets the batch as `kv=`: some tokens of each request, which attend to its tokens up to themselves. On a CPU the kernel
computes the same sums for any batch, matrix products in float32 (with `MKL_CBWR`) for most sizes.

Left out: sliding windows (`module.py` refuses them), soft caps and sinks (refused at the first forward).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from spmd_rl.base.errors import UserError
from spmd_rl.engine.native.kv import KVPool

ATTENTION = "spmd_paged"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows with equally many new tokens and similar tables."""

    tokens: slice
    """R rows of Q tokens each, row by row"""
    tables: Tensor
    """int64 [R, N]: blocks of each row, padded with any block"""
    mask: Tensor
    """model dtype [R, 1, Q * G, N * BLOCK], or [R, 1, 1, N * BLOCK] for Q = 1: 0 where a token reads, else -inf. G:
    query heads per key head"""


@dataclass(frozen=True, slots=True)
class Paged:
    """Cache layout for a forward of T packed tokens."""

    pool: KVPool
    slots: Tensor
    """int64 [T]: slot of each token; further tokens of the forward are padding"""
    buckets: tuple[Bucket, ...]
    places: Mapping[int, int]
    """number in the pool of each attention layer, by number in the model"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store key and value [T, KVH, D]; return what query [T, H, D] reads, [T, H, D]."""
        layer = self.places[layer]
        # Write all rows first: a row may read blocks that another row of this batch fills.
        self.pool.write(layer, self.slots, key, value)
        heads = (key.shape[1], query.shape[1] // key.shape[1])
        parts = []
        for bucket in self.buckets:
            keys, values = self.pool.read(layer, bucket.tables)
            # The query heads of one key head are treated as queries of one sequence, so that no key is repeated.
            q = query[bucket.tokens].unflatten(1, heads).unflatten(0, (len(bucket.tables), -1)).transpose(1, 2)
            out = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=bucket.mask, scale=scaling)
            parts.append(out.unflatten(2, q.shape[2:4]).transpose(1, 2).flatten(2, 3).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def causal_mask(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of `width` keys for tokens at `positions`, int64 [..., 1]: [..., width]."""
    later = torch.arange(width, device=positions.device) > positions
    return torch.zeros(later.shape, dtype=dtype, device=positions.device).masked_fill_(later, -math.inf)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    kv: Paged,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, KVH, T, D] -> [1, T, H, D].

    UserError for a model whose attention is more than this.
    """
    assert attention_mask is None
    if softcap is not None or s_aux is not None:
        raise UserError(
            f"policy.model: engine=native supports no soft-capping and no attention sinks ({type(module).__name__})"
        )
    num_tokens, num_filled = len(kv.slots), query.shape[2]
    query, key, value = (x[0].transpose(0, 1)[:num_tokens] for x in (query, key, value))
    out = kv.attend(module.layer_idx, query, key, value, scaling)
    return F.pad(out, (0, 0, 0, 0, 0, num_filled - num_tokens))[None], None


AttentionInterface.register(ATTENTION, paged_attention)
