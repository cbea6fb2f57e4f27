"""Quantities of tokens summed up over micro-batches: sums, and under names that end in `/max` or `/min` extremes.

The least is kept as the greatest of the negated values, so that ranks join all extremes in one way.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def is_extreme(name: str) -> bool:
    """Whether the greatest or the least value counts, not the mean."""
    return name.endswith(("/max", "/min"))


def nothing(name: str) -> float:
    """The value of a sum, or of an extreme, over no tokens."""
    return -math.inf if is_extreme(name) else 0.0


def joined(name: str, before: Tensor | float | None, values: Tensor | None) -> Tensor | float:
    """The sum or extreme `before` joined with more `values`, [N] or a single sum; without values, `before`."""
    before = nothing(name) if before is None else before
    if values is None or not values.numel():
        return before
    values = values.double()
    if not is_extreme(name):
        return before + values.sum()
    most = (-values if name.endswith("/min") else values).max()
    return torch.maximum(most, torch.as_tensor(before, dtype=most.dtype, device=most.device))


def extremes(found: Mapping[str, float]) -> dict[str, float]:
    """Extremes with the sign of their names (see above); those over no tokens are left out."""
    return {name: -v if name.endswith("/min") else v for name, v in found.items() if v > -math.inf}
