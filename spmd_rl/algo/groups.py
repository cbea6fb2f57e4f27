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
    _, index = torch.unique(groups, return_inverse=True)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_min(values: Tensor, groups: Tensor) -> Tensor:
    """Smallest of `values` [n] in each one's group. Returns [n]."""
    _, index = torch.unique(groups, return_inverse=True)
    return torch.full_like(values, torch.inf).scatter_reduce(0, index, values, "amin")[index]


def group_mean(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean of each one's group, weighted by `weights` [n] (default 1; positive sum in every group). Returns [n]."""
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    low = group_min(values, groups)
    return low + group_sum((values - low) * weights, groups) / group_sum(weights, groups)


def group_std(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Standard deviation of each one's group with Bessel's correction; 0 for a group of one. Returns [n].

    `weights` are counts: a sample of weight w stands for w equal ones.
    """
    weights = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    squares = group_sum((values - group_mean(values, groups, weights)).square() * weights, groups)
    return (squares / (group_sum(weights, groups) - 1).clamp(min=1)).sqrt()
