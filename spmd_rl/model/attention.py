"""Packed attention: many sequences laid end to end in one row, each seeing only itself.

Registered with transformers under the name `spmd_packed`; the model's forward is given `packing=Packing.of(starts)`
and hands it down to every layer. Two kernels behind one function: variable-length flash attention on an accelerator,
and elsewhere a scatter into right-padded rows, where plain causal attention needs no mask because no real token comes
after a pad. Left out: key-value caches, dropout, sliding windows that would cut a segment, segments with parents.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "spmd_packed"
SHORT = 64
"""Segments up to this length share one padded block: below it, kernel launches cost more than padding."""

ROUND = 16
"""Padded lengths are multiples of this: kernels are kept per shape."""


@dataclass(frozen=True, slots=True)
class Block:
    """Segments of similar length (within a factor of two), padded to the longest of them."""

    num_segments: int
    length: int
    tokens: Tensor
    """int64 [n]: index of each of the block's tokens in the packed row"""
    slots: Tensor
    """int64 [n]: index of the same token in the padded [num_segments * length]"""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the segments of one packed row lie. Built once per forward and shared by all layers."""

    starts: Tensor
    """int32 [S+1]: first token of each segment, then T"""
    max_length: int
    blocks: tuple[Block, ...]
    order: Tensor
    """int64 [T]: index of each packed token among the blocks' tokens, laid end to end"""

    @classmethod
    def of(cls, starts: Tensor) -> "Packing":
        """From `Batch.starts` (int64 [S+1]); on the device of `starts`. Every segment holds at least one token."""
        bounds = starts.tolist()
        classes: dict[int, list[int]] = defaultdict(list)
        for segment, (begin, end) in enumerate(pairwise(bounds)):
            assert end > begin, "an empty segment"
            classes[(max(end - begin, SHORT) - 1).bit_length()].append(segment)
        blocks = tuple(_block(bounds, classes[size], starts.device) for size in sorted(classes))
        tokens = torch.cat([block.tokens for block in blocks])
        lengths = [end - begin for begin, end in pairwise(bounds)]
        return cls(starts.to(torch.int32), max(lengths), blocks, torch.argsort(tokens))


def _block(bounds: list[int], segments: list[int], device: torch.device) -> Block:
    lengths = [bounds[s + 1] - bounds[s] for s in segments]
    longest = -(-max(lengths) // ROUND) * ROUND
    tokens = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in segments])
    slots = torch.cat([torch.arange(row * longest, row * longest + n) for row, n in enumerate(lengths)])
    return Block(len(segments), longest, tokens.to(device), slots.to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packing: Packing,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """As transformers calls it: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__}: attention soft-capping and sinks are not supported")
    if sliding_window is not None and packing.max_length > sliding_window:
        raise ValueError(f"a sequence of {packing.max_length} tokens exceeds the sliding window of {sliding_window}")
    assert attention_mask is None and query.shape[0] == 1
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = _varlen if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) else _padded
    return attend(q, k, v, packing, scaling)[None], None


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float) -> Tensor:
    """[T, H, D], [T, Hkv, D], [T, Hkv, D] -> [T, H, D], block by block of right-padded rows."""
    dtype = q.dtype
    if q.device.type == "cpu" and dtype == torch.bfloat16:  # its backward kernel is four times faster in float32
        q, k, v = q.float(), k.float(), v.float()
    outs = []
    for block in packing.blocks:
        rows = [_scatter(x, block) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        outs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, block.slots))
    out = outs[0] if len(outs) == 1 else torch.cat(outs).index_select(0, packing.order)
    return out.to(dtype)


def _scatter(x: Tensor, block: Block) -> Tensor:
    """[T, H, D] -> [num_segments, H, length, D], zero to the right of each segment."""
    size = block.num_segments * block.length
    if block.tokens.numel() == size == x.shape[0]:  # all of one length: nothing to move
        rows = x
    else:
        mine = x if block.tokens.numel() == x.shape[0] else x.index_select(0, block.tokens)
        rows = x.new_zeros(size, *x.shape[1:]).index_copy(0, block.slots, mine)
    return rows.reshape(block.num_segments, block.length, *x.shape[1:]).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float) -> Tensor:
    """The same by torch's variable-length flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        *(x.contiguous() for x in (q, k, v)),
        packing.starts,
        packing.starts,
        packing.max_length,
        packing.max_length,
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=q.shape[1] != k.shape[1],
    )


def register() -> None:
    """Make `attn_implementation="spmd_packed"` known. No mask function beside it: transformers then builds no mask."""
    AttentionInterface.register(NAME, packed_attention)
