"""Discounted sums over packed samples, without a loop over tokens."""

import torch
from torch import Tensor


def discounted_sums(values: Tensor, samples: Tensor, gamma: float, positions: Tensor | None = None) -> Tensor:
    """Return the discounted sum from each token to the end of its sample.

        y_t = sum over s >= t of the same sample of gamma^(position_s - position_t) * values_s

    values: float [N]; samples: int64 [N], non-decreasing; positions: int64 [N], rising within a sample (default: one
    apart). Returns [N], dtype of `values`. Pass k adds the sum that starts 2^k tokens later, so a sample of L tokens
    takes log2(L) passes, and its result does not depend on its neighbours.
    """
    positions = torch.arange(len(values), device=values.device) if positions is None else positions
    sums, reach = values, 1
    while reach < len(values) and bool((same := samples[reach:] == samples[:-reach]).any()):
        # Across samples the distance may be negative, and 0^-1 is infinite.
        distance = (positions[reach:] - positions[:-reach]) * same
        factor = torch.pow(gamma, distance.to(values.dtype)) * same
        sums = torch.cat([sums[:-reach] + factor * sums[reach:], sums[-reach:]])
        reach *= 2
    return sums
