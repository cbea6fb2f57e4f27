"""Sums, means and standard deviations over the samples of each group, returned for each sample.

To treat the batch as one group, pass `zeros_like(groups)`. Values are shifted by their group's smallest before they are
summed, so that equal values have exactly that mean and a deviation of exactly 0.
"""

import torch
from torch import Tensor

EPSILON = 1e-6
"""Number that is added to a standard deviation before dividing by it"""


def group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Sum `values` [n] over the group of each sample. groups: int64 [n]. Returns [n], dtype of `values`."""
    return _sum(values, _dense(groups))


def group_min(values: Tensor, groups: Tensor) -> Tensor:
    """Return the smallest of `values` [n] in the group of each sample, [n]."""
    return _min(values, _dense(groups))


def group_mean(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over the group of each sample, [n], weighted by `weights` [n] (default 1; sums must be
    positive)."""
    return _mean(values, _dense(groups), _weights(values, weights))


def group_std(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the standard deviation over the group of each sample, [n], with Bessel's correction; 0 for a group of one.

    `weights` are counts: a sample of weight w stands for w equal ones.
    """
    return group_mean_std(values, groups, weights)[1]


def group_mean_std(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `group_mean` and `group_std` together."""
    index, weights = _dense(groups), _weights(values, weights)
    mean, counts = _mean(values, index, weights), _sum(weights, index)
    squares = _sum((values - mean).square() * weights, index)
    return mean, (squares / (counts - 1).clamp(min=1)).sqrt()


def _dense(groups: Tensor) -> Tensor:
    """Renumber the groups 0, 1, ..."""
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
