"""Changes of scores before the advantages, in this order: scale, shift, penalties, normalisation, clip; and masks and
weights of samples.

A masked sample stays in its group's baseline; it has no loss and does not count in the divisors of the loss. All
functions take one number per scored sample of the global batch.
"""

import torch
from torch import Tensor

from spmd_rl.algo.moments import EPSILON, Moments, group_mean, group_std, group_sum


def scale_shift(scores: Tensor, *, reward_scale: float, reward_shift: float) -> Tensor:
    """Scale and shift the scores.

        r' = reward_scale * r + reward_shift

    Source: none; ROLL's keys.
    Keys: `reward_scale`: factor; `reward_shift`: added to the product.
    Use: domains have rewards of different sizes, and the estimator does not normalise.

    scores: float64 [n]. Returns float64 [n].
    """
    return reward_scale * scores + reward_shift


def overlong_penalty(lengths: Tensor, max_tokens: int, *, overlong_tokens: int, overlong_coef: float) -> Tensor:
    """Return the soft penalty of answers near the token limit, an addend of the score.

        P = -c * min(max((l - (L_max - L_cache)) / L_cache, 0), 1)

    Source: DAPO (arXiv 2503.14476, eq. 13).
    Keys: `overlong_tokens`: L_cache (0: none within the limit); `overlong_coef`: c.
    Use: many answers are truncated; the paper has L_cache a fifth of L_max, and c 1.

    lengths: int64 [n]; max_tokens: L_max. Returns float64 [n], never above 0.
    """
    excess = (lengths - (max_tokens - overlong_tokens)).double()
    return -overlong_coef * (excess / max(overlong_tokens, EPSILON)).clamp(0, 1)


def format_penalty(wrong_format: Tensor, *, format_penalty: float) -> Tensor:
    """Return the penalty of a wrong format, an addend of the score.

        P = -format_penalty where the verdict is `wrong_format`, else 0

    Source: none; as in ROLL's agentic runs.
    Keys: `format_penalty`: points lost.
    Use: the policy forgets the rewarder's format.

    wrong_format: bool [n]. Returns float64 [n].
    """
    return -format_penalty * wrong_format.double()


def repetition_penalty(token_ids: Tensor, *, repetition_ngram: int, repetition_coef: float) -> float:
    """Return the penalty for repeated n-grams of an answer, an addend of its score.

        P = -c * (1 - distinct n-grams / n-grams)

    Source: Yeo et al. (arXiv 2502.03373, appendix C.2), over tokens.
    Keys: `repetition_ngram`: n; `repetition_coef`: c.
    Use: answers loop.

    token_ids: int [l]. Returns a float in [-c, 0].
    """
    if len(token_ids) < repetition_ngram:
        return 0.0
    ngrams = token_ids.unfold(0, repetition_ngram, 1)
    return -repetition_coef * (1 - len(torch.unique(ngrams, dim=0)) / len(ngrams))


def normalise(
    scores: Tensor,
    groups: Tensor,
    running: Moments,
    domains: Tensor | None = None,
    *,
    norm_mean_type: str,
    norm_std_type: str,
) -> Tensor:
    """Subtract a mean and divide by a standard deviation, each over the batch, group, domain or run.

        r' = (r - mean) / (std + 1e-6)

    Source: none; ROLL's reward normalisation. std with Bessel's correction.
    Keys: `norm_mean_type`, `norm_std_type`: `none`, `batch`, `group`, `domain` or `running`.
    Use: before `reinforce` and the token-level estimators. Group and group is GRPO, group and batch Lite PPO; domain if
    rewards of tasks differ in size. `step_reinforce` normalises the returns of steps.

    scores: float64 [n]; groups, domains: int64 [n]; running: moments of all scores so far, with these. Returns float64
    [n]; no division where the deviation is 0.
    """
    over = {"group": groups, "batch": torch.zeros_like(groups)}
    if domains is not None:
        over["domain"] = domains
    means = {"none": 0.0, "running": running.mean}
    stds = {"none": 0.0, "running": running.std}
    mean = group_mean(scores, over[norm_mean_type]) if norm_mean_type in over else means[norm_mean_type]
    std = group_std(scores, over[norm_std_type]) if norm_std_type in over else stds[norm_std_type]
    std = torch.as_tensor(std, dtype=scores.dtype)
    return (scores - mean) / (std + EPSILON).where(std > 0, 1.0)


def clip(values: Tensor, bound: float) -> Tensor:
    """Clip scores or advantages to plus and minus a bound.

        x' = min(max(x, -bound), bound)

    Source: none; ROLL's keys.
    Keys: `reward_clip`, `advantage_clip`: the bounds; null does not clip.
    Use: rewards of a model, or unbounded ones.

    values: any shape and dtype.
    """
    return values.clamp(-bound, bound)


def max_len_mask(truncated: Tensor) -> Tensor:
    """Keep the answers that ended by themselves; mask truncated ones.

    Source: DAPO (arXiv 2503.14476, section 3.4, overlong filtering).
    Use: the limit, not the answer, would decide the score.

    truncated: bool [n]. Returns bool [n].
    """
    return ~truncated


def difficulty_mask(
    scores: Tensor, groups: Tensor, *, difficulty_low_threshold: float, difficulty_high_threshold: float
) -> Tensor:
    """Keep groups whose prompts are neither too hard nor too easy.

        keep = low < mean(r_g) < high

    Source: DAPO (arXiv 2503.14476, section 3.2) uses (0, 1), and resamples masked groups.
    Keys: `difficulty_low_threshold`, `difficulty_high_threshold`: low and high.
    Use: many groups are nearly all right or all wrong.

    scores: float64 [n], before shaping; groups: int64 [n]. Returns bool [n]. A group of one stays.
    """
    means = group_mean(scores, groups)
    alone = group_sum(torch.ones_like(scores), groups) == 1
    return alone | ((means > difficulty_low_threshold) & (means < difficulty_high_threshold))


def variance_mask(scores: Tensor, groups: Tensor, *, variance_top_p: float, variance_eps: float) -> Tensor:
    """Keep the groups whose scores vary most, up to a share of all groups' standard deviations.

        keep the fewest groups, by falling v = std(r_g), whose sum of v >= variance_top_p * sum_all v - variance_eps

    Source: RAGEN-2 (arXiv 2604.06268, SNR-aware filtering, top-p over reward variance). As in the authors' code,
    standard deviations, with Bessel's correction.
    Keys: `variance_top_p`: the share, such as 0.9; null keeps all groups; `variance_eps`: deviation that may be
    missing.
    Use: many groups have nearly equal returns, whose gradient is noise. Groups without variance are never kept.

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
    Keys: `error_max_len_threshold`: tokens; `pass_score`: least score of a right answer.
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
    """Weight answers linearly, from the shortest of the batch down to the longest.

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
    """Scale weights to a mean of 1 over the global batch, which keeps the size of the update.

        w' = w * n / sum(w)

    Source: none; ROLL does so per micro-batch.
    Use: always, on the product of these weights.

    weights: float64 [n], of positive sum. Returns float64 [n].
    """
    return weights / weights.mean() if weights.numel() else weights
