"""Collectives through which gradients flow: the backward pass of each is the collective that undoes it.

Ranks of a group compute one loss together, which is the sum of what each of them adds to it. So a tensor that has been
gathered gets a part of its gradient on each rank, and the parts are summed on their way back.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] The rows of all ranks, one rank's after the other's: [t, ...] -> [size * t, ...]."""
    return _Undoable.apply(x, partial(_gathered, group=group), partial(_summed, group=group))


def sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] The sum over ranks, of which each gets a run of rows: [size * t, ...] -> [t, ...]."""
    return _Undoable.apply(x, partial(_summed, group=group), partial(_gathered, group=group))


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] Part i goes to rank i, and part i comes from it: [size, ...] -> [size, ...]."""
    one_each = [1] * group.size()
    return exchange_rows(x, one_each, one_each, group)


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """[all] Rows to and from each rank of `group`, in its order: [sum(sent), ...] -> [sum(received), ...]."""
    forth = partial(_exchanged, sent=sent, received=received, group=group)
    return _Undoable.apply(rows, forth, partial(_exchanged, sent=received, received=sent, group=group))


def collect(values: Tensor, places: Tensor, num_places: int, group: dist.ProcessGroup) -> Tensor:
    """[all] What each rank computes of some rows, all of them on all ranks, which go on with them alike.

    values: [n, ...], this rank's, which belong at `places` (int64 [n]) of the result [num_places, ...].
    """

    def whole(values: Tensor) -> Tensor:
        all_rows = values.new_zeros(num_places, *values.shape[1:]).index_copy_(0, places, values)
        dist.all_reduce(all_rows, group=group)
        return all_rows

    # All ranks compute the same loss of the whole: the part of its gradient that belongs here is all of it.
    return _Undoable.apply(values, whole, lambda grad: grad.index_select(0, places))


class _Undoable(torch.autograd.Function):
    """A linear function, and what its backward pass makes of the gradient."""

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
