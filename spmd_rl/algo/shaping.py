"""Changes of the scores before the advantages: scale and shift, penalties, normalisation and clip, in this order.

They take the metadata of the global batch, one number per sample, of the samples that have a score.
"""

import torch
from torch import Tensor

from spmd_rl.algo.groups import EPSILON, group_mean, group_std
from spmd_rl.algo.moments import Moments


def scale_shift(scores: Tensor, *, reward_scale: float, reward_shift: float) -> Tensor:
    """Scale and shift the scores.

        r' = reward_scale * r + reward_shift

    Source: none; ROLL's keys.
    Keys: `reward_scale`: factor; `reward_shift`: added to the product.
    Use: domains have rewards of different sizes and the estimator does not normalise.

    scores: float64 [n]. Returns float64 [n].
    """
    return reward_scale * scores + reward_shift


def overlong_penalty(lengths: Tensor, max_tokens: int, *, overlong_tokens: int, overlong_coef: float) -> Tensor:
    """Return the soft penalty of answers near the token limit, to be added to the score.

        P = -c * min(max((l - (L_max - L_cache)) / L_cache, 0), 1)

    Source: DAPO (arXiv 2503.14476, eq. 13).
    Keys: `overlong_tokens`: L_cache; 0 penalises nothing within the limit; `overlong_coef`: c.
    Use: many answers are truncated; the paper has L_cache a fifth of L_max, and c 1.

    lengths: int64 [n]; max_tokens: L_max. Returns float64 [n], never above 0.
    """
    excess = (lengths - (max_tokens - overlong_tokens)).double()
    return -overlong_coef * (excess / max(overlong_tokens, EPSILON)).clamp(0, 1)


def format_penalty(wrong_format: Tensor, *, format_penalty: float) -> Tensor:
    """Return the penalty of answers in the wrong format, to be added to the score.

        P = -format_penalty where the verdict is `wrong_format`, else 0

    Source: none; ROLL's agentic runs have it.
    Keys: `format_penalty`: what such an answer loses.
    Use: the policy forgets the format that the rewarder reads.

    wrong_format: bool [n]. Returns float64 [n].
    """
    return -format_penalty * wrong_format.double()


def repetition_penalty(token_ids: Tensor, *, repetition_ngram: int, repetition_coef: float) -> float:
    """Return the penalty for n-grams of an answer that repeat an earlier one, to be added to its score.

        P = -c * (1 - distinct n-grams / n-grams)

    Source: Demystifying Long Chain-of-Thought Reasoning in LLMs (arXiv 2502.03373, appendix C.2), over tokens.
    Keys: `repetition_ngram`: n; `repetition_coef`: c.
    Use: answers loop. One shorter than an n-gram loses nothing.

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
    """Subtract a mean from the scores and divide by a standard deviation, each over the batch, the group, the domain or
    the run.

        r' = (r - mean) / (std + 1e-6)

    Source: none; ROLL's reward normalisation. std with Bessel's correction.
    Keys: `norm_mean_type`, `norm_std_type`: `none`, `batch`, `group`, `domain` or `running`.
    Use: before `reinforce` and the token-level estimators. Group and group is GRPO, group and batch Lite PPO; domain
    where rewards of different tasks or environments differ in size. With `step_reinforce` it is the returns of steps
    that are normalised.

    scores: float64 [n]; groups, domains: int64 [n]; running: the moments of all scores so far, with these. Returns
    float64 [n]. Where the deviation is 0, scores are not divided.
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
    """Clip values to plus and minus a bound: `reward_clip` for scores, `advantage_clip` for advantages.

        x' = min(max(x, -bound), bound)

    Source: none; ROLL's keys.
    Keys: `reward_clip`, `advantage_clip`: the bound of each; null does not clip.
    Use: rewards come from a model or are unbounded.

    Values of any shape and dtype; the result has the same.
    """
    return values.clamp(-bound, bound)
