"""Attention over the paged cache, as the module's layers call it.

Registered with transformers under `ATTENTION`; a name without a mask function makes models build no mask. The engine
hands its batch to `module(..., kv=...)`, which transformers passes down to every layer. Two kinds of batch:

    Prefill    whole prompts end to end; each attends causally to itself; their keys and values are stored
    Decode     one token per request, which attends to all its request has stored

Left out: sliding windows (`module.py` refuses them), soft caps and sinks (refused at the first forward).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from spmd_rl.engine.native.kv import KVPool
from spmd_rl.errors import UserError

ATTENTION = "spmd_paged"


class Packed(Protocol):
    """What a forward of T packed tokens needs to know of the cache."""

    slots: Tensor
    """int64 [T]; the forward may be longer: what follows is filling"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store key and value [T, KVH, D] and return what query [T, H, D] reads: [T, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts that start at position 0."""

    pool: KVPool
    slots: Tensor
    """int64 [T]: where each token is stored"""
    spans: tuple[tuple[int, int], ...]
    """first token and end of each prompt"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Packed`."""
        self.pool.write(layer, self.slots, key, value)
        groups = query.shape[1] // key.shape[1]
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        parts = []
        for begin, end in self.spans:
            q, k, v = (x[:, :, begin:end] for x in (query, key, value))
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
        return torch.cat(parts, dim=2)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Rows of a decode batch whose tables are about equally long."""

    rows: slice
    tables: Tensor
    """int64 [R, N]: blocks of each row, padded with any block"""
    mask: Tensor
    """model dtype [R, 1, 1, N * BLOCK]: 0 where the row has a token stored, -inf elsewhere"""


@dataclass(frozen=True, slots=True)
class Decode:
    """One token per request."""

    pool: KVPool
    slots: Tensor
    """int64 [R]: where each row's token is stored"""
    buckets: tuple[LengthBucket, ...]
    """all rows, in order"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `Packed`."""
        self.pool.write(layer, self.slots, key, value)
        parts = []
        for bucket in self.buckets:
            keys, values = self.pool.read(layer, bucket.tables)
            # The query heads of one key head stand where queries of one sequence would: no key is repeated.
            q = query[bucket.rows].unflatten(1, (key.shape[1], -1))
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bucket.mask, scale=scaling)
            parts.append(out.flatten(1, 2))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    kv: Packed,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, KVH, T, D] -> [1, T, H, D].

    UserError for a model whose attention is more than this.
    """
    assert attention_mask is None
    if softcap is not None or s_aux is not None:
        raise UserError(f"policy.model: engine=native knows no soft cap and no sinks ({type(module).__name__})")
    num_tokens, num_filled = len(kv.slots), query.shape[2]
    query, key, value = (x[0].transpose(0, 1)[:num_tokens] for x in (query, key, value))
    out = kv.attend(module.layer_idx, query, key, value, scaling)
    return F.pad(out, (0, 0, 0, 0, 0, num_filled - num_tokens))[None], None


AttentionInterface.register(ATTENTION, paged_attention)
