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
    index = _dense(groups)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_mean(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over the group of each sample, [n], weighted by `weights` [n] (default 1; sums must be
    positive)."""
    index, weights = _dense(groups), _weights(values, weights)
    low = torch.full_like(values, torch.inf).scatter_reduce(0, index, values, "amin")[index]
    return low + group_sum((values - low) * weights, index) / group_sum(weights, index)


def group_std(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the standard deviation over the group of each sample, [n], with Bessel's correction; 0 for a group of one.

    `weights` are counts: a sample of weight w counts as w equal ones.
    """
    weights = _weights(values, weights)
    squares = group_sum((values - group_mean(values, groups, weights)).square() * weights, groups)
    return (squares / (group_sum(weights, groups) - 1).clamp(min=1)).sqrt()


def _dense(groups: Tensor) -> Tensor:
    """Renumber the groups 0, 1, ..."""
    return torch.unique(groups, return_inverse=True)[1]


def _weights(values: Tensor, weights: Tensor | None) -> Tensor:
    return torch.ones_like(values) if weights is None else weights.to(values.dtype)
