"""Packed attention: segments end to end in one row, each seeing itself and the segments it continues.

Registered with transformers as `spmd_packed`; forwards get `packing=Packing.of(starts)`. A segment without a parent is
a sequence. One with a parent continues it: its tokens see the path from the root, and themselves causally, so samples
share prefixes.

Two kernels: variable-length flash attention on an accelerator, elsewhere a scatter into right-padded rows, where causal
attention needs a mask only for parents. Ranks may split a row (`context.py`). Left out: sliding windows that would cut
a sequence.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface

from spmd_rl.base.devices import kind, to_device

NAME = "spmd_packed"
# Segments up to this length share one padded block: below it, kernel launches cost more than padding.
SHORT = 64

ROUND = 16
"""Multiple of padded lengths: kernels are cached per shape"""
# A flag that varlen_attn needs since then for fewer key-value heads than heads; torch.compile traces no `signature`.
ASKS_FOR_GQA = Version(torch.__version__) >= Version("2.12")


@dataclass(frozen=True, slots=True)
class Rows:
    """Spans of packed tokens as right-padded rows."""

    num_rows: int
    length: int
    tokens: Tensor
    """int64 [n]: each token's index in the packed row"""
    slots: Tensor
    """int64 [n]: each token's index in the padded [num_rows * length]"""
    whole: bool
    """True if the rows are all tokens in order"""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of similar length (within a factor of two), padded to the longest."""

    queries: Rows
    """a segment's tokens, or those of several short ones with the same path"""
    keys: Rows
    """tokens of the path, then their own; equal to `queries` without parents"""
    mask: Tensor | None
    """bool [num_rows, 1, queries.length, keys.length]: visible keys; None: plain causal attention"""


class HeadExchange(Protocol):
    """Communication around attention, of ranks that split a row."""

    def before(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[all] Return queries, keys and values for this rank's attention, from its tokens': [tokens, heads, D]."""
        ...

    def after(self, out: Tensor) -> Tensor:
        """[all] Return outputs of this rank's tokens, from those it computed."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's queries of a row, when ranks have all keys and values."""

    chunks: tuple[range, ...]
    """spans of the row's tokens on this rank"""
    places: Tensor
    """int64 [T]: index of each token among the keys"""


@dataclass(frozen=True, slots=True)
class Packing:
    """Segments of a packed row. Built once per forward on the CPU and shared by all layers.

    Contains its kernel's inputs: `blocks` and `order`, or `seen` for the variable-length one (`uses_varlen`).
    """

    starts: Tensor
    """int32 [S+1]: first token of each segment, then T"""
    max_length: int
    """tokens of the longest segment"""
    max_seen: int
    """tokens of the longest segment with its path"""
    blocks: tuple[Block, ...]
    order: Tensor | None
    """int64 [T]: index of each packed token among the blocks' query tokens; None if in order, or without blocks"""
    seen: Tensor | None
    """int64 [n]: each segment's path and own tokens, end to end; None without parents, or with blocks"""
    seen_starts: Tensor
    """int32 [S+1]: each segment's first index in `seen`"""
    exchange: HeadExchange | None = None
    """Communication around attention, if ranks split the row"""

    @classmethod
    def of(
        cls,
        starts: Tensor,
        parents: Tensor | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        exchange: HeadExchange | None = None,
        share: Share | None = None,
    ) -> "Packing":
        """Build the packing. starts: first token of each segment, then T (int64 [S+1]); no segment is empty.

        parents: int64 [S], the segment that each continues, -1 for none. device, dtype: of queries; by default that of
        `starts`, and float32. share: this rank's queries; by default all.
        """
        device = device or starts.device
        runs = [range(begin, end) for begin, end in pairwise(starts.tolist())]
        assert all(runs), "an empty segment"
        paths = _paths(runs, [-1] * len(runs) if parents is None else parents.tolist())
        pieces = _pieces(paths, runs, share)
        lengths = [piece.num_seen for piece in pieces]
        blocks, order, seen = (), None, None
        if not uses_varlen(device, dtype):
            blocks = _blocks(pieces, runs[-1].stop, share)
            tokens = torch.cat([block.queries.tokens for block in blocks])
            order = None if torch.equal(tokens, torch.arange(len(tokens))) else torch.argsort(tokens)
        elif share or any(paths):
            seen = _among_keys(_token_indices([piece.keys for piece in pieces]), share)
        packing = cls(
            starts=torch.tensor([0, *(piece.queries.stop for piece in pieces)]).to(torch.int32),
            max_length=max(len(piece.queries) for piece in pieces),
            max_seen=max(lengths),
            blocks=blocks,
            order=order,
            seen=seen,
            seen_starts=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            exchange=exchange,
        )
        return _moved(packing, device)


def uses_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if such queries use the variable-length kernel."""
    return kind(device) == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _paths(runs: list[range], parents: list[int]) -> list[list[range]]:
    paths: list[list[range]] = []
    for parent in parents:
        path: list[range] = []
        while parent >= 0:
            path.insert(0, runs[parent])
            parent = parents[parent]
        paths.append(path)
    return paths


def _total(path: Sequence[range]) -> int:
    return sum(map(len, path))


def _size(num_tokens: int) -> int:
    """Return a length's class: one class shares padded rows."""
    return (max(num_tokens, SHORT) - 1).bit_length() if num_tokens else 0


@dataclass(frozen=True, slots=True)
class _Piece:
    before: tuple[range, ...]
    """tokens of the row that it sees before itself"""
    own: range
    queries: range
    """positions of its tokens among this rank's"""

    @property
    def keys(self) -> list[range]:
        return [*self.before, self.own]

    @property
    def num_seen(self) -> int:
        return _total(self.keys)


def _pieces(paths: list[list[range]], runs: list[range], share: Share | None) -> list[_Piece]:
    if share is None:
        return [_Piece(tuple(path), own, own) for path, own in zip(paths, runs, strict=True)]
    found, place = [], 0
    for chunk in share.chunks:
        for path, run in zip(paths, runs, strict=True):
            own = range(max(run.start, chunk.start), min(run.stop, chunk.stop))
            if own:
                before = [*path, range(run.start, own.start)] if own.start > run.start else path
                found.append(_Piece(tuple(before), own, range(place, place + len(own))))
                place += len(own)
    return found


def _blocks(pieces: list[_Piece], num_tokens: int, share: Share | None) -> tuple[Block, ...]:
    """Return blocks of pieces with their paths, by classes of similar length. num_tokens: T."""
    classes: dict[tuple[int, int], list[list[_Piece]]] = defaultdict(list)
    for row in _side_by_side(pieces):
        classes[_size(_total(row[0].before)), _size(sum(len(piece.own) for piece in row))].append(row)
    num_queries = pieces[-1].queries.stop
    return tuple(_block(some, num_queries, num_tokens, share) for _, some in sorted(classes.items()))


def _side_by_side(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Return each padded row's pieces: short ones with the same path share its keys."""
    rows: list[list[_Piece]] = []
    begun: dict[tuple[range, ...], list[_Piece]] = {}
    for piece in pieces:
        row = begun.get(piece.before) if piece.before else None
        if row is None or sum(len(other.own) for other in row) + len(piece.own) > SHORT:
            rows.append(row := [])
            begun[piece.before] = row
        row.append(piece)
    return rows


def _block(rows: list[list[_Piece]], num_queries: int, num_keys: int, share: Share | None) -> Block:
    queries = _rows([[piece.queries for piece in row] for row in rows], num_queries)
    has_path = any(row[0].before for row in rows)
    if share is None and not has_path:
        return Block(queries, queries, None)
    keys = _rows([[*row[0].before, *(piece.own for piece in row)] for row in rows], num_keys, share)
    if not has_path:
        return Block(queries, keys, None)
    # A query sees the path and its own piece up to itself: no padding, and no other piece of the same row.
    paths = torch.tensor([_total(row[0].before) for row in rows])[:, None]
    lengths = [[len(piece.own) for piece in row] for row in rows]
    first = torch.zeros(queries.num_rows, queries.length, dtype=torch.int64)
    for number, own in enumerate(lengths):
        sizes = torch.tensor(own)
        first[number, : sum(own)] = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    first, last = (paths + first)[:, :, None], (paths + torch.arange(queries.length))[:, :, None]
    key = torch.arange(keys.length)
    return Block(queries, keys, ((key < paths[:, :, None]) | ((key >= first) & (key <= last)))[:, None])


def _rows(rows: list[list[range]], num_tokens: int, share: Share | None = None) -> Rows:
    lengths = [_total(row) for row in rows]
    longest = -(-max(lengths) // ROUND) * ROUND
    tokens = _among_keys(_token_indices(rows), share)
    slots = torch.cat([torch.arange(i * longest, i * longest + n) for i, n in enumerate(lengths)])
    return Rows(len(rows), longest, tokens, slots, torch.equal(tokens, torch.arange(num_tokens)))


def _among_keys(tokens: Tensor, share: Share | None) -> Tensor:
    return tokens if share is None else share.places[tokens]


def _token_indices(rows: list[list[range]]) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for row in rows for run in row])


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return to_device(value, device)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    if is_dataclass(value):
        return replace(value, **{f.name: _moved(getattr(value, f.name), device) for f in fields(value)})
    return value


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
    """Compute attention for transformers: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
    if softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__}: attention soft-capping and sinks are not supported")
    if sliding_window is not None and packing.max_seen > sliding_window:
        raise ValueError(f"a sequence of {packing.max_seen} tokens exceeds the sliding window of {sliding_window}")
    assert attention_mask is None and query.shape[0] == 1
    width = value.shape[-1]
    # Latent attention has narrower values, but the exchange and the kernels need equal widths.
    if width < key.shape[-1]:
        value = F.pad(value, (0, key.shape[-1] - width))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packing.exchange:
        q, k, v = packing.exchange.before(q, k, v)  # [all]
    attend = _varlen if uses_varlen(q.device, q.dtype) else _padded
    out = attend(q, k, v, packing, scaling)
    if packing.exchange:
        out = packing.exchange.after(out)  # [all]
    return out[None, ..., :width], None


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float) -> Tensor:
    """[T, H, D], [T, Hkv, D], [T, Hkv, D] -> [T, H, D], by blocks of right-padded rows."""
    dtype = q.dtype
    # On a CPU the backward kernel in float32 is four times as fast as in bfloat16.
    if kind(q.device) == "cpu" and dtype == torch.bfloat16:
        q, k, v = q.float(), k.float(), v.float()
    outs = []
    for block in packing.blocks:
        rows = _scatter(q, block.queries), _scatter(k, block.keys), _scatter(v, block.keys)
        out = F.scaled_dot_product_attention(
            *rows,
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, block.queries.slots))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    out = out if packing.order is None else out.index_select(0, packing.order)
    return out.to(dtype)


def _scatter(x: Tensor, rows: Rows) -> Tensor:
    """[T, H, D] -> [num_rows, H, length, D], zero-padded right."""
    size = rows.num_rows * rows.length
    # All rows have one length: nothing to move.
    if rows.whole and size == x.shape[0]:
        padded = x
    else:
        mine = x if rows.whole else x.index_select(0, rows.tokens)
        padded = x.new_zeros(size, *x.shape[1:]).index_copy(0, rows.slots, mine)
    return padded.reshape(rows.num_rows, rows.length, *x.shape[1:]).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float) -> Tensor:
    """Compute the same by torch's variable-length flash attention, whose causal mask aligns to the last key."""
    from torch.nn.attention.varlen import varlen_attn

    if packing.seen is not None:
        k, v = k.index_select(0, packing.seen), v.index_select(0, packing.seen)
    return varlen_attn(
        *(x.contiguous() for x in (q, k, v)),
        packing.starts,
        packing.seen_starts,
        packing.max_length,
        packing.max_seen,
        scale=scaling,
        window_size=(-1, 0),  # causal
        **({"enable_gqa": q.shape[1] != k.shape[1]} if ASKS_FOR_GQA else {}),
    )


def register() -> None:
    """Register `spmd_packed` without a mask function, so that transformers builds no mask."""
    AttentionInterface.register(NAME, packed_attention)
