"""Losses of single answers that were found good or bad."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

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


def binary(values: Tensor, labels: Tensor) -> Tensor:
    """The loss of a reward model that says whether an answer, or a step of one, is right.

        L = -log sigmoid(v) where it is right, -log sigmoid(-v) where it is wrong

    Source: outcome: Cobbe et al. 2021, arXiv 2110.14168; process: Lightman et al. 2023, arXiv 2305.20050.
    Keys: none
    Use: `python -m spmd_rl.reward_model head=outcome` and `head=process`.

    values: float [N], logits; labels: [N], 1 or 0; returns float [N].
    """
    return binary_cross_entropy_with_logits(values, labels.to(values.dtype), reduction="none")
