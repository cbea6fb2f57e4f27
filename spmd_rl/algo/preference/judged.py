"""Losses of single answers that were found good or bad."""

import torch
from torch import Tensor

from spmd_rl.algo.inputs import Judged


def kto(judged: Judged, *, beta: float, desirable_weight: float, undesirable_weight: float) -> Tensor:
    """Kahneman-Tversky optimisation: each answer against what answers gain on average, without any pair.

        L = desirable_weight (1 - sigmoid(beta (r - z))), or undesirable_weight (1 - sigmoid(beta (z - r)))
        z = max(0, mean of r over prompts with answers to other prompts), without gradient

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8.
    Keys: `beta`, `desirable_weight`, `undesirable_weight`
    Use: votes in place of pairs. Where one kind is rarer, weight it: 1 to 1.33 times the other kind in all.

    Returns float [S].
    """
    gain = beta * (judged.rewards - judged.baseline)
    good = desirable_weight * (1 - gain.sigmoid())
    return torch.where(judged.desirable, good, undesirable_weight * (1 - (-gain).sigmoid()))
