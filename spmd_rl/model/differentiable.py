"""Differentiable collectives, with the adjoint collective as backward pass.

The loss is the sum of ranks' terms, so each rank has a part of a gathered tensor's gradient, and the backward pass sums
the parts.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] Concatenate the rows of all ranks: [t, ...] -> [size * t, ...]."""
    return _Undoable.apply(x, partial(_gathered, group=group), partial(_summed, group=group))


def sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] Sum over ranks and scatter spans of rows: [size * t, ...] -> [t, ...]."""
    return _Undoable.apply(x, partial(_summed, group=group), partial(_gathered, group=group))


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] Exchange part i with rank i: [size, ...] -> [size, ...]."""
    one_each = [1] * group.size()
    return exchange_rows(x, one_each, one_each, group)


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """[all] Exchange rows with the group's ranks, in order: [sum(sent), ...] -> [sum(received), ...]."""
    forth = partial(_exchanged, sent=sent, received=received, group=group)
    return _Undoable.apply(rows, forth, partial(_exchanged, sent=received, received=sent, group=group))


def collect(values: Tensor, places: Tensor, num_places: int, group: dist.ProcessGroup) -> Tensor:
    """[all] Return all ranks' computed rows, for computations equal on all ranks.

    values: this rank's rows, [n, ...], at `places` (int64 [n]) of the result [num_places, ...].
    """

    def whole(values: Tensor) -> Tensor:
        all_rows = values.new_zeros(num_places, *values.shape[1:]).index_copy_(0, places, values)
        dist.all_reduce(all_rows, group=group)
        return all_rows

    # All ranks compute the same loss of the whole: the part of its gradient that belongs here is all of it.
    return _Undoable.apply(values, whole, lambda grad: grad.index_select(0, places))


class _Undoable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, function: Callable[[Tensor], Tensor], undo: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.undo = undo
        return function(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.undo(grad), None, None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather(out, x.contiguous(), group=group)
    return out


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter(out, x.contiguous(), group=group)
    return out


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
