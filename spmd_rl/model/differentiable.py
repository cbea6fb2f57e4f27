"""Collectives through which gradients flow: the backward pass of each is the collective that undoes it.

Ranks of a group compute one loss together, which is the sum of what each of them adds to it. So a tensor that has been
gathered gets a part of its gradient on each rank, and the parts are summed on their way back.
"""

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] The rows of all ranks, one rank's after the other's: [t, ...] -> [size * t, ...]."""
    return _GatherRows.apply(x, group)


def sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] The sum over ranks, of which each gets a run of rows: [size * t, ...] -> [t, ...]."""
    return _SumRows.apply(x, group)


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] Part i goes to rank i, and part i comes from it: [size, ...] -> [size, ...]."""
    return _ExchangeParts.apply(x, group)


def collect(values: Tensor, places: Tensor, num_places: int, group: dist.ProcessGroup) -> Tensor:
    """[all] What each rank computes of some rows, all of them on all ranks, which go on with them alike.

    values: [n, ...], this rank's, which belong at `places` (int64 [n]) of the result [num_places, ...].
    """
    return _Collect.apply(values, places, num_places, group)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, places: Tensor, num_places: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(num_places, *values.shape[1:]).index_copy_(0, places, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        # All ranks compute the same loss of the whole: the part of its gradient that belongs here is all of it.
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


class _ExchangeParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather(out, x.contiguous(), group=group)
    return out


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter(out, x.contiguous(), group=group)
    return out


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
