"""Group sums, means and deviations, and moments that merge over ranks and steps.

Group statistics are returned for each sample. To treat the batch as one group, pass `zeros_like(groups)`. Equal values
have exactly that mean and a deviation of exactly 0.

Moments (count, mean and sum of squared deviations) serve whitening, running normalisation and explained variance. Ranks
gather the three numbers and merge them in rank order: one collective, and no cancellation.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

EPSILON = 1e-6
"""Addend of a standard deviation that is divided by"""


def group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """Sum `values` [n] over the group of each sample. groups: int64 [n]. Returns [n], dtype of `values`."""
    index = _dense(groups)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_mean(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over each sample's group, [n], weighted by `weights` [n] (default 1; positive sums)."""
    index, weights = _dense(groups), _weights(values, weights)
    # Shifted by the group's smallest value, so that equal values have exactly that mean.
    low = torch.full_like(values, torch.inf).scatter_reduce(0, index, values, "amin")[index]
    return low + group_sum((values - low) * weights, index) / group_sum(weights, index)


def group_std(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the standard deviation over each sample's group, [n], with Bessel's correction; 0 for a group of one.

    `weights` are counts: a sample of weight w counts as w equal ones.
    """
    weights = _weights(values, weights)
    squares = group_sum((values - group_mean(values, groups, weights)).square() * weights, groups)
    return (squares / (group_sum(weights, groups) - 1).clamp(min=1)).sqrt()


def _dense(groups: Tensor) -> Tensor:
    return torch.unique(groups, return_inverse=True)[1]


def _weights(values: Tensor, weights: Tensor | None) -> Tensor:
    return torch.ones_like(values) if weights is None else weights.to(values.dtype)


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of a set of values, at first empty. JSON and msgpack carry them exactly."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    """sum of (value - mean)^2"""

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> "Moments":
        """Compute the moments of values [N] where `mask` (bool [N]) holds, in float64."""
        chosen = (values if mask is None else values[mask]).detach().double()
        if not chosen.numel():
            return cls()
        # Shifted by the first value, so that equal values have exactly their mean and no variance.
        mean = chosen[0] + (chosen - chosen[0]).mean()
        return cls(float(chosen.numel()), float(mean), float((chosen - mean).square().sum()))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both sets (Chan, Golub, LeVeque 1979, eq. 2.1)."""
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return Moments(count, mean, self.m2 + other.m2 + delta**2 * self.count * other.count / count)

    @property
    def variance(self) -> float:
        """Variance with Bessel's correction; 0 for fewer than two values."""
        return self.m2 / (self.count - 1) if self.count > 1 else 0.0

    @property
    def std(self) -> float:
        """Standard deviation, the root of `variance`."""
        return self.variance**0.5


def merged(parts: Iterable[Moments]) -> Moments:
    """Merge moments in the given order; ranks must use the same."""
    return reduce(Moments.merge, parts, Moments())


def whiten(values: Tensor, moments: Moments) -> Tensor:
    """Shift and scale to mean 0 and deviation 1 over the global batch.

        x' = (x - mean) / (std + 1e-6)

    Source: REINFORCE++ (arXiv 2501.03262, global advantage normalisation); std with Bessel's correction.
    Use: PPO and REINFORCE++, whose advantages have no fixed scale.

    values: float [N], any part of the values that `moments` describe. Returns [N], dtype of `values`. Equal values
    become 0.
    """
    return (values - moments.mean) / (moments.std + EPSILON)
