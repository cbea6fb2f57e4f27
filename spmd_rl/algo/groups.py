"""Sums, means and deviations over the samples of one group, given back to each of them.

A batch is one group: pass `zeros_like(groups)`. Values are shifted by their group's smallest before they are summed,
so that equal values have exactly that mean and exactly no deviation.
"""

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a standard deviation that divides."""


def group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Sum of `values` [n] over the samples of each one's group. groups: int64 [n]. Returns [n], dtype of `values`."""
    return _sum(values, _dense(groups))


def group_min(values: Tensor, groups: Tensor) -> Tensor:
    """Smallest of `values` [n] in each one's group. Returns [n]."""
    return _min(values, _dense(groups))


def group_mean(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean of each one's group, weighted by `weights` [n] (default 1; positive sum in every group). Returns [n]."""
    return _mean(values, _dense(groups), _weights(values, weights))


def group_std(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Standard deviation of each one's group with Bessel's correction; 0 for a group of one. Returns [n].

    `weights` are counts: a sample of weight w stands for w equal ones.
    """
    return group_mean_std(values, groups, weights)[1]


def group_mean_std(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`group_mean` and `group_std`, in little more time than one of them."""
    index, weights = _dense(groups), _weights(values, weights)
    mean, counts = _mean(values, index, weights), _sum(weights, index)
    squares = _sum((values - mean).square() * weights, index)
    return mean, (squares / (counts - 1).clamp(min=1)).sqrt()


def _dense(groups: Tensor) -> Tensor:
    """The groups numbered 0, 1, ...: as expensive as all that is done with them, so it is done once."""
    return torch.unique(groups, return_inverse=True)[1]


def _weights(values: Tensor, weights: Tensor | None) -> Tensor:
    return torch.ones_like(values) if weights is None else weights.to(values.dtype)


def _sum(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _min(values: Tensor, index: Tensor) -> Tensor:
    return torch.full_like(values, torch.inf).scatter_reduce(0, index, values, "amin")[index]


def _mean(values: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    low = _min(values, index)
    return low + _sum((values - low) * weights, index) / _sum(weights, index)
