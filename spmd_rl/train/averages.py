"""Per-token metrics accumulated over micro-batches: sums, or extremes under names that end in `/max` or `/min`.

A minimum is stored as the maximum of negated values, so that one max-reduction joins all extremes.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def is_extreme(name: str) -> bool:
    """Return True for metrics reduced by max or min, not by mean."""
    return name.endswith(("/max", "/min"))


def nothing(name: str) -> float:
    """Return the value of a sum, or of an extreme, over no tokens."""
    return -math.inf if is_extreme(name) else 0.0


def joined(name: str, before: Tensor | float | None, values: Tensor | None) -> Tensor | float:
    """Return the sum or extreme `before` joined with more `values`, [N] or a single sum; without values, `before`."""
    before = nothing(name) if before is None else before
    if values is None or not values.numel():
        return before
    # float64: rounding in long float32 sums would show in the means.
    values = values.double()
    if not is_extreme(name):
        return before + values.sum()
    most = (-values if name.endswith("/min") else values).max()
    return torch.maximum(most, torch.as_tensor(before, dtype=most.dtype, device=most.device))


def extremes(found: Mapping[str, float]) -> dict[str, float]:
    """Return extremes with the sign of their names (see above), without those over no tokens."""
    return {name: -v if name.endswith("/min") else v for name, v in found.items() if v > -math.inf}
