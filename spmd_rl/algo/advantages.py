"""Advantage estimators over the scores of a whole step. Each takes every scored sample of the global batch."""

import torch
from torch import Tensor

EPSILON = 1e-6


def grpo(scores: Tensor, groups: Tensor, *, norm_std: bool = True) -> Tensor:
    """Group-relative advantage: a score minus its group's mean, over the group's standard deviation.

    A_i = (r_i - mean(r_g)) / (std(r_g) + 1e-6), std with Bessel's correction (DeepSeekMath, arXiv 2402.03300, eq. 21);
    `norm_std=False` leaves the division out (Dr.GRPO, arXiv 2503.20783). A group of one gets 0.

    scores: float64 [n]; groups: int64 [n], equal numbers mark a group. Returns float64 [n].
    """
    _, index = torch.unique(groups, return_inverse=True)
    num_groups = int(index.max()) + 1 if index.numel() else 0
    zeros = torch.zeros(num_groups, dtype=scores.dtype)
    counts = zeros.index_add(0, index, torch.ones_like(scores))
    means = zeros.index_add(0, index, scores) / counts
    centred = scores - means[index]
    if not norm_std:
        return centred
    variances = zeros.index_add(0, index, centred**2) / (counts - 1).clamp(min=1)
    return centred / (variances.sqrt() + EPSILON)[index]
