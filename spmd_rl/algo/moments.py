"""Count, mean and sum of squared deviations, for whitening, running normalisation and explained variance.

Each rank computes `Moments.of` its values, and all gather the three numbers and merge them in rank order: this takes
one collective and has no cancellation, unlike a sum of squares. Kept over steps, the same three numbers are a running
mean and deviation.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from spmd_rl.algo.groups import EPSILON


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments of a set of values, at first of none. JSON and msgpack carry them exactly."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    """sum of the squared deviations, (value - mean)^2"""

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> "Moments":
        """Compute the moments of the values [N] where `mask` (bool [N]) holds, in float64 and two passes."""
        chosen = (values if mask is None else values[mask]).detach().double()
        if not chosen.numel():
            return cls()
        # Shifted by the first value, so that equal values have exactly their mean and no variance.
        mean = chosen[0] + (chosen - chosen[0]).mean()
        return cls(float(chosen.numel()), float(mean), float((chosen - mean).square().sum()))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both sets of values together (Chan, Golub, LeVeque 1979, eq. 2.1)."""
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        return Moments(count, mean, self.m2 + other.m2 + delta**2 * self.count * other.count / count)

    @property
    def variance(self) -> float:
        """The variance with Bessel's correction; 0 for fewer than two values."""
        return self.m2 / (self.count - 1) if self.count > 1 else 0.0

    @property
    def std(self) -> float:
        """The standard deviation, the square root of `variance`."""
        return self.variance**0.5


def merged(parts: Iterable[Moments]) -> Moments:
    """Merge moments in the given order, so that the result is equal on ranks that give the same order."""
    return reduce(Moments.merge, parts, Moments())


def whiten(values: Tensor, moments: Moments) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the global batch.

        x' = (x - mean) / (std + 1e-6)

    Source: REINFORCE++ (arXiv 2501.03262, global advantage normalisation); std with Bessel's correction.
    Use: PPO and REINFORCE++, whose advantages have no fixed scale.

    values: float [N], any part of the values that `moments` describe. Returns [N], dtype of `values`. Equal values, and
    one alone, become 0.
    """
    return (values - moments.mean) / (moments.std + EPSILON)
