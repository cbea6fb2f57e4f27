"""`Row`: a micro-batch's tokens as a transformers module gets them on one rank, padded."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.base.devices import to_device
from spmd_rl.batch import Batch
from spmd_rl.model.attention import Packing
from spmd_rl.model.constraint import Allowed, Constraint
from spmd_rl.model.hybrid import Segments
from spmd_rl.model.logprobs import Candidates, Support, TokenHead
from spmd_rl.train.base import ForwardArgs
from spmd_rl.train.microbatch import padded
from spmd_rl.train.sharing import PrefixTree, share_prefixes

# Kernels and primitives are cached per shape: with free shapes, the process of a 0.2 MB model grew from 412 to 1,128 MB
# in 300 updates.
ROUND_TOKENS, FEW_TOKENS = 128, 32
"""Multiples of padding, of tokens and targets; the second for few"""


def filled_up(rows: Tensor) -> Tensor:
    """Return [N, ..] padded with zeros to the next `granule`."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, -len(rows) % granule(len(rows))))


def granule(count: int) -> int:
    """Return the multiple to which `count` tokens are padded."""
    return ROUND_TOKENS if count > ROUND_TOKENS else FEW_TOKENS


class Row(NamedTuple):
    """Tokens of a micro-batch for this rank, on the CPU."""

    token_ids: Tensor
    """int64 [t], padded at the end"""
    position_ids: Tensor
    """int64 [t], within each sample; or [axes, t]"""
    packing: Packing
    """Segments for attention, on the device"""
    keep: Tensor
    """int64 [n]: tokens that predict a target"""
    targets: Tensor
    """int64 [n]: tokens of the micro-batch to predict"""
    own: Tensor | None
    """int64 [n]: positions among all targets; None: all, in order"""
    routed: Tensor
    """bool [t]: not padding, so counted in experts' load"""
    chosen: Tensor | None
    """int64 [t, layers, k]: the engine's experts; None: the model's choice"""
    tree: PrefixTree
    """Segments of the micro-batch, padded, on the CPU"""
    shown: Any = None
    """Pictures of the tokens, a `model.pictures.Shown` on the CPU, if any"""

    def apart(self, is_hybrid: bool) -> dict[str, Any]:
        """Return the arguments that keep sequences apart in a transformers module."""
        found: dict[str, Any] = {"packing": self.packing}
        if is_hybrid:
            # The name under which transformers hands it to layers with a state.
            found["seq_idx"] = Segments.of(self.tree.starts, self.tree.parents, self.packing.starts.device)
        return found


def row_of(
    micro: Batch,
    device: torch.device,
    dtype: torch.dtype,
    tp: int = 1,
    context: Any = None,
    chosen_of: Callable[[Batch, PrefixTree], Tensor | None] = lambda micro, tree: None,
    processor: Any = None,
) -> Row:
    """Return this rank's `Row`. dtype: of attention. tp: ranks that split tokens. context: see `model.context`.
    chosen_of: the engine's experts by token of the tree. processor: a `model.pictures.Processor`, if pictures are seen.
    """
    targets = micro.sampled.index
    assert bool((micro.position_ids[targets] > 0).all()), "a sequence's first token has no logprob"
    tree = share_prefixes(micro)
    # A dummy micro-batch has only padding.
    num_tokens = len(tree.token_ids) if int(micro.keys[0, 0]) >= 0 else 0
    split = tp * (1 if context is None else context.granule)
    tree = padded(tree, math.lcm(granule(len(tree.token_ids)), split))
    keep = tree.gather_index[targets - 1]
    chosen, shown = chosen_of(micro, tree), None
    if processor is not None:
        tree, shown = _shown(micro, tree, processor)
    if context is None:
        packing = Packing.of(tree.starts, tree.parents, device, dtype)
        routed = torch.arange(len(tree.token_ids)) < num_tokens
        return Row(
            token_ids=tree.token_ids,
            position_ids=tree.position_ids,
            packing=packing,
            keep=keep,
            targets=targets,
            own=None,
            routed=routed,
            chosen=chosen,
            tree=tree,
            shown=shown,
        )
    tokens = context.tokens(len(tree.token_ids))
    places = torch.full_like(tree.token_ids, -1).index_copy_(0, tokens, torch.arange(len(tokens)))[keep]
    own = (places >= 0).nonzero()[:, 0]
    return Row(
        token_ids=tree.token_ids[tokens],
        position_ids=tree.position_ids[tokens],
        packing=context.packing(tree.starts, tree.parents, device, dtype),
        keep=places[own],
        targets=targets[own],
        own=own,
        routed=tokens < num_tokens,
        chosen=None if chosen is None else chosen[tokens],
        tree=tree,
    )


def _shown(micro: Batch, tree: PrefixTree, processor: Any) -> tuple[PrefixTree, Any]:
    pieces = [micro.token_ids[begin:end] for begin, end in pairwise(micro.starts.tolist())]
    samples = list(zip(pieces, micro.encoded_pictures, strict=True))
    shown = processor.shown(samples)
    index = torch.full_like(tree.token_ids, -1)
    index[tree.gather_index[processor.is_placeholder(micro.token_ids)]] = shown.index
    # Samples that share a token have the same pictures before it, so they agree on its positions.
    positions = tree.position_ids.repeat(processor.axes, 1)
    positions[:, tree.gather_index] = torch.cat([processor.positions(*sample) for sample in samples], 1)
    ids = processor.model_ids(tree.token_ids)
    tree = replace(tree, token_ids=ids, position_ids=positions if processor.axes > 1 else positions[0])
    return tree, shown._replace(index=index[processor.is_placeholder(ids)])


def parts(found: Tensor, args: ForwardArgs) -> tuple[Tensor, ...]:
    """Return a policy's outputs (see `MicrobatchLoop.finish`) from its head's columns [N, n]."""
    return (found[:, 0], found[:, 1], found[:, 2:]) if args.compares else found.unbind(-1)


def aim(head: TokenHead, micro: Batch, row: Row, args: ForwardArgs, device: torch.device) -> None:
    """Set the targets of the head's next forward."""
    targets = micro.token_ids[row.targets]
    if args.compares:
        others = micro.teacher_ids.index_select(0, row.targets).values.long()
        targets = torch.cat([targets[:, None], others.view(len(targets), -1)], 1)
    head.targets, head.top = to_device(filled_up(targets), device), args.top
    head.temperature, head.support = args.temperature, _support(micro, row, args.constraint, device)


def _support(micro: Batch, row: Row, constraint: Constraint | None, device: torch.device) -> Support | None:
    # Recorded candidates already satisfy a constraint.
    if micro.candidate_ids is not None:
        lists = micro.candidate_ids.index_select(0, row.targets)
        return Candidates(to_device(lists.owners, device), to_device(lists.values.long(), device))
    # A dummy micro-batch has no answer to follow.
    if constraint is None or int(micro.keys[0, 0]) < 0:
        return None
    sampled = micro.sampled
    answers = micro.token_ids[sampled.index].split(sampled.spans.bincount().tolist())
    allowed = constraint.replay([answer.tolist() for answer in answers])
    index = allowed.index if row.own is None else allowed.index[row.own]
    return Allowed(to_device(allowed.words, device), to_device(filled_up(index), device))
