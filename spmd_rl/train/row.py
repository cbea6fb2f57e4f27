"""`Row`: the tokens of a micro-batch as they enter a module of transformers on one rank, and how they are filled up."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.base.devices import to_device
from spmd_rl.batch import Batch
from spmd_rl.model.attention import Packing
from spmd_rl.model.constraint import Allowed, Constraint
from spmd_rl.model.logprobs import Candidates, Support, TokenHead
from spmd_rl.train.base import ForwardArgs
from spmd_rl.train.microbatch import rounded
from spmd_rl.train.sharing import PrefixTree, share_prefixes

ROUND_TOKENS, FEW_TOKENS = 128, 32
"""Tokens and targets of a forward are filled up to a multiple of the first; few of them to one of the second."""


def filled_up(rows: Tensor) -> Tensor:
    """[N, ..] -> [N rounded up, ..], zeros at the end: kernels are kept per shape."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, -len(rows) % granule(len(rows))))


def granule(count: int) -> int:
    """A multiple of what `count` tokens are filled up to."""
    return ROUND_TOKENS if count > ROUND_TOKENS else FEW_TOKENS


class Row(NamedTuple):
    """The tokens of a micro-batch that enter this rank's part of the model, on the CPU."""

    token_ids: Tensor
    """int64 [t]"""
    position_ids: Tensor
    """int64 [t]"""
    packing: Packing
    """on the device"""
    keep: Tensor
    """int64 [n]: which of the tokens predict a target"""
    targets: Tensor
    """int64 [n]: the tokens of the micro-batch that they predict"""
    own: Tensor | None
    """int64 [n]: which of all its targets these are; None: all, in order"""
    routed: Tensor
    """bool [t]: which tokens count as a mixture's load, those that are no filling"""
    chosen: Tensor | None
    """int64 [t, layers, k]: the experts that the engine chose, see `replay.py`; None: the model's own"""


def row_of(
    micro: Batch,
    device: torch.device,
    dtype: torch.dtype,
    tp: int = 1,
    context: Any = None,
    chosen_of: Callable[[Batch, PrefixTree], Tensor | None] = lambda micro, tree: None,
) -> Row:
    """This rank's `Row` of a micro-batch. dtype: of attention. tp: ranks that share out the row's tokens.

    context: of context parallelism (`model.context`). chosen_of: the engine's experts, by token of the tree.
    """
    targets = micro.sampled.index
    assert bool((micro.position_ids[targets] > 0).all()), "a sequence's first token has no logprob"
    tree = share_prefixes(micro)
    num_tokens = len(tree.token_ids) if int(micro.keys[0, 0]) >= 0 else 0  # a dummy has none
    split = tp * (1 if context is None else context.granule)
    tree = rounded(tree, math.lcm(granule(len(tree.token_ids)), split))
    keep = tree.gather_index[targets - 1]
    chosen = chosen_of(micro, tree)
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
    )


def parts(found: Tensor, args: ForwardArgs) -> tuple[Tensor, ...]:
    """What a policy's forward gives, of the columns [N, n] of its head: see `MicrobatchLoop.finish`."""
    return (found[:, 0], found[:, 1], found[:, 2:]) if args.compares else found.unbind(-1)


def aim(head: TokenHead, micro: Batch, row: Row, args: ForwardArgs, device: torch.device) -> None:
    """Set the output embedding of a policy to give the logprobs of the row's targets in its next forward."""
    targets = micro.token_ids[row.targets]
    if args.compares:
        others = micro.teacher_ids.index_select(0, row.targets).values.long()
        targets = torch.cat([targets[:, None], others.view(len(targets), -1)], 1)
    head.targets, head.top = to_device(filled_up(targets), device), args.top
    head.temperature, head.support = args.temperature, _support(micro, row, args.constraint, device)


def _support(micro: Batch, row: Row, constraint: Constraint | None, device: torch.device) -> Support | None:
    """Among which tokens the row's targets were drawn. What was recorded holds none that a constraint forbids."""
    if micro.candidate_ids is not None:
        lists = micro.candidate_ids.index_select(0, row.targets)
        return Candidates(to_device(lists.owners, device), to_device(lists.values.long(), device))
    if constraint is None or int(micro.keys[0, 0]) < 0:  # a dummy answers nothing
        return None
    sampled = micro.sampled
    answers = micro.token_ids[sampled.index].split(sampled.runs.bincount().tolist())
    allowed = constraint.replay([answer.tolist() for answer in answers])
    index = allowed.index if row.own is None else allowed.index[row.own]
    return Allowed(to_device(allowed.words, device), to_device(filled_up(index), device))
