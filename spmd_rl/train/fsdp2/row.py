"""`Row`: the tokens of a micro-batch as they enter the model of one rank, and how they are filled up."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from spmd_rl.model.attention import Packing

ROUND_TOKENS, FEW_TOKENS = 128, 32
"""Tokens and targets of a forward are filled up to a multiple of the first; few of them to one of the second."""


def filled_up(rows: Tensor) -> Tensor:
    """[N] -> [N rounded up], zeros at the end: kernels are kept per shape."""
    return F.pad(rows, (0, -len(rows) % granule(len(rows))))


def granule(count: int) -> int:
    """A multiple of what `count` tokens are filled up to."""
    return ROUND_TOKENS if count > ROUND_TOKENS else FEW_TOKENS


class Row(NamedTuple):
    """What a rank computes of a micro-batch: the tokens that enter its model, on the CPU."""

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
    """int64 [t, layers, k]: the experts that the engine chose, see `Replay`; None: the model's own"""
