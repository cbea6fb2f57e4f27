"""Discounted sums to the end of each sample, over packed samples, without a loop over tokens."""

import torch
from torch import Tensor


def discounted_sums(values: Tensor, samples: Tensor, gamma: float, places: Tensor | None = None) -> Tensor:
    """y_t = sum over s >= t of the same sample of gamma^(place_s - place_t) * values_s.

    values: float [N]; samples: int64 [N], non-decreasing; places: int64 [N], rising within a sample (default: one
    apart). Returns [N], dtype of `values`. By doubling: pass k adds the sum that starts 2^k further, so a sample of L
    tokens takes log2(L) passes, and what a sample gets does not depend on its neighbours.
    """
    places = torch.arange(len(values), device=values.device) if places is None else places
    sums, reach = values, 1
    while reach < len(values) and bool((same := samples[reach:] == samples[:-reach]).any()):
        distance = (places[reach:] - places[:-reach]) * same  # across samples it may be negative: 0^-1 is infinite
        factor = torch.pow(gamma, distance.to(values.dtype)) * same
        sums = torch.cat([sums[:-reach] + factor * sums[reach:], sums[-reach:]])
        reach *= 2
    return sums
