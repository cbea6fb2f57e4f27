"""Masks and weights of samples, computed from the metadata of the global batch.

A masked sample stays in the baseline of its group; it has no loss and does not count in the divisors of the loss.
"""

import torch
from torch import Tensor

from spmd_rl.algo.groups import group_mean, group_std, group_sum


def max_len_mask(truncated: Tensor) -> Tensor:
    """Keep the answers that ended by themselves and mask those that were truncated at the token limit.

    Source: DAPO (arXiv 2503.14476, section 3.4, overlong filtering).
    Use: the limit, not the answer, would decide the score.

    truncated: bool [n]. Returns bool [n].
    """
    return ~truncated


def difficulty_mask(
    scores: Tensor, groups: Tensor, *, difficulty_low_threshold: float, difficulty_high_threshold: float
) -> Tensor:
    """Keep the groups whose prompts are neither too hard nor too easy.

        keep = low < mean(r_g) < high

    Source: DAPO (arXiv 2503.14476, section 3.2) has it with (0, 1), and samples again in place of masked groups.
    Keys: `difficulty_low_threshold`, `difficulty_high_threshold`: low and high.
    Use: many groups are nearly all right or all wrong.

    scores: float64 [n], as judged, before shaping; groups: int64 [n]. Returns bool [n]. A group of one shows nothing of
    difficulty and stays.
    """
    means = group_mean(scores, groups)
    alone = group_sum(torch.ones_like(scores), groups) == 1
    return alone | ((means > difficulty_low_threshold) & (means < difficulty_high_threshold))


def variance_mask(scores: Tensor, groups: Tensor, *, variance_top_p: float, variance_eps: float) -> Tensor:
    """Keep the groups whose scores vary most, until they hold a share of the standard deviations of all groups.

        keep the fewest groups, by falling v = std(r_g), whose sum of v >= variance_top_p * sum_all v - variance_eps

    Source: RAGEN-2 (arXiv 2604.06268, SNR-aware filtering, top-p over reward variance). The paper says variance; its
    authors' code takes the standard deviation under that name, and so does this, with Bessel's correction.
    Keys: `variance_top_p`: the share, such as 0.9; null keeps all groups; `variance_eps`: deviation that may be
    missing, so that a step in which nothing varies keeps nothing.
    Use: many groups of agents have nearly equal returns, whose gradient is noise. A group without variance is never
    kept.

    scores: float64 [n], as judged; groups: int64 [n]. Returns bool [n].
    """
    names, number = torch.unique(groups, return_inverse=True)
    by_group = torch.zeros(len(names), dtype=scores.dtype).scatter(0, number, group_std(scores, groups))
    falling, order = by_group.sort(descending=True, stable=True)
    missing = variance_top_p * falling.sum() - variance_eps - (falling.cumsum(0) - falling)  # before each group
    kept = torch.zeros(len(names), dtype=torch.bool).scatter(0, order, (missing > 0) & (falling > 0))
    return kept[number]


def error_max_len_mask(scores: Tensor, lengths: Tensor, *, error_max_len_threshold: int, pass_score: float) -> Tensor:
    """Keep all right answers, and the wrong ones that are not too long.

        keep = r >= pass_score or l < error_max_len_threshold

    Source: none; ROLL's `error_max_len_clip`, here for scores of any size.
    Keys: `error_max_len_threshold`: tokens; `pass_score`: a score of at least this is right.
    Use: long wrong answers make up most tokens.

    scores: float64 [n], as judged; lengths: int64 [n]. Returns bool [n].
    """
    return (scores >= pass_score) | (lengths < error_max_len_threshold)


def difficulty_weight(difficulty: Tensor) -> Tensor:
    """Give more weight to harder prompts.

        w = 0.5 + 1.5 * min(max(d, 0), 1)

    Source: none; ROLL's `difficulty_loss_weight`.
    Use: hard prompts are rarely solved. d is 1 - mean(r_g), or a difficulty that the data give.

    difficulty: float64 [n]. Returns float64 [n]; `mean_one` comes after.
    """
    return 0.5 + 1.5 * difficulty.clamp(0, 1)


def length_weight(lengths: Tensor) -> Tensor:
    """Give less weight to longer answers, linearly between the shortest and the longest of the batch.

        w = 1.5 - (l - l_min) / (l_max - l_min)

    Source: none; ROLL's `length_loss_weight`, here over the global batch.
    Use: answers grow without gain.

    lengths: int64 [n]. Returns float64 [n]; `mean_one` comes after.
    """
    if not lengths.numel():
        return lengths.double()
    low, high = lengths.min(), lengths.max()
    return 1.5 - (lengths - low).double() / (high - low).clamp(min=1)


def mean_one(weights: Tensor) -> Tensor:
    """Scale weights to a mean of 1 over the global batch, so that they do not change the size of the update.

        w' = w * n / sum(w)

    Source: none; ROLL does so per micro-batch.
    Use: after the product of the weights above, always.

    weights: float64 [n], of positive sum. Returns float64 [n].
    """
    return weights / weights.mean() if weights.numel() else weights
