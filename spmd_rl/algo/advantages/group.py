"""Advantages from one score per sample, compared with the other answers to the same prompt.

Each function returns float64 [n]. Samples without a score are in no baseline. Where a group has one answer, or equal
scores, the advantage is exactly 0 unless the function says otherwise.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.moments import EPSILON, group_mean, group_std, group_sum


def grpo(scored: Scored, *, norm_std: bool) -> Tensor:
    """Subtract the group's mean score and divide by its standard deviation. The paper's runs also have `kl_coef=0.04`
    and `loss_agg=seq-mean-token-mean`; the defaults are no KL and `token-mean`.

        A_i = (r_i - mean(r_g)) / (std(r_g) + 1e-6)

    Source: DeepSeekMath (arXiv 2402.03300, section 4.1.2); std with Bessel's correction.
    Keys: `norm_std`: divide by the deviation (false: Dr.GRPO).
    Use: the default, for verifiable rewards with several answers per prompt.
    """
    centred = scored.scores - group_mean(scored.scores, scored.groups)
    return centred / (group_std(scored.scores, scored.groups) + EPSILON) if norm_std else centred


def dr_grpo(scored: Scored) -> Tensor:
    """Subtract the group's mean score: GRPO without the division, which favours very easy and hard prompts.

        A_i = r_i - mean(r_g)

    Source: Dr.GRPO (arXiv 2503.20783, section 3.2).
    Use: with `seq-mean-token-sum-norm`, which removes the length bias.
    """
    return grpo(scored, norm_std=False)


def rloo(scored: Scored) -> Tensor:
    """Subtract the mean score of the *other* answers of the group, an unbiased baseline. The paper's beta is
    `kl_reward_coef`, by default 0.

        A_i = r_i - sum_{j != i} r_j / (n_g - 1) = n_g / (n_g - 1) * (r_i - mean(r_g)),   r_i = score_i - beta KL_i

    Source: Back to Basics (arXiv 2402.14740, RLOO).
    Use: as `grpo`, if the size of a score has a meaning. A group of one gets 0.
    """
    counts = group_sum(torch.ones_like(scored.scores), scored.groups)
    return grpo(scored, norm_std=False) * counts / (counts - 1).clamp(min=1)


def reinforce(scored: Scored) -> Tensor:
    """Use the score itself, without a baseline.

        A_i = r_i

    Source: REINFORCE (Williams 1992).
    Use: scores are normalised (`norm_mean_type`, `norm_std_type`), or to see what a baseline gains. A group of equal
    scores keeps its advantage.
    """
    return scored.scores.clone()


def reinforce_pp_baseline(scored: Scored) -> Tensor:
    """Subtract the group's mean, then whiten over all tokens of the batch.

        A'_i = r_i - mean(r_g);   A_i = (A'_i - mean_tokens(A')) / (std_tokens(A') + 1e-6)

    Source: REINFORCE++ (arXiv 2501.03262, REINFORCE++-baseline). A sample counts as often as it has tokens. verl adds
    1e-8 to the variance in place of 1e-6 to the deviation: results differ by up to 1e-5.
    Use: small groups, or deviations often near 0.
    """
    centred = grpo(scored, norm_std=False)
    batch, lengths = torch.zeros_like(scored.groups), scored.lengths.clamp(min=1)
    return (centred - group_mean(centred, batch, lengths)) / (group_std(centred, batch, lengths) + EPSILON)


def remax(scored: Scored) -> Tensor:
    """Subtract the score of the prompt's greedy answer. The authors' code also has `kl_reward_coef=0.05`,
    `loss_agg=token-mean` and a discount of 0.99 a token; the defaults are no KL and no discount.

        A_i = r_i - r(greedy answer)

    Source: ReMax (arXiv 2310.10505).
    Use: one answer per prompt, and a greedy one. Equal scores give 0 only if the greedy answer has that score.
    """
    assert scored.greedy is not None, "remax needs the score of a greedy answer for every prompt"
    return scored.scores - scored.greedy


def opo(scored: Scored) -> Tensor:
    """Subtract the group's mean weighted by length: the baseline of least variance in exact on-policy training.

        A_i = r_i - b_g,   b_g = sum_j l_j r_j / sum_j l_j

    Source: OPO (arXiv 2505.23585).
    Use: one update a step, without KL and entropy terms. An empty answer counts as one token.
    """
    return scored.scores - group_mean(scored.scores, scored.groups, scored.lengths.clamp(min=1))


def lite_ppo(scored: Scored) -> Tensor:
    """Subtract the group's mean and divide by the batch's standard deviation.

        A_i = (r_i - mean(r_g)) / (std(r_batch) + 1e-6)

    Source: Tricks or Traps? (arXiv 2508.08221); std with Bessel's correction.
    Use: `token-mean`, no KL; many groups nearly all right or wrong.
    """
    std = group_std(scored.scores, torch.zeros_like(scored.groups))
    return grpo(scored, norm_std=False) / (std + EPSILON)


def maxrl(scored: Scored) -> Tensor:
    """Divide by the group's mean, not its deviation: maximum likelihood of a right answer, estimated from n answers.

        A_i = (r_i - mean(r_g)) / mean(r_g), and 0 where mean(r_g) <= 0

    With scores of 0 and 1 and a chance p of a right answer, the expected gradient has the first n - 1 terms of log p =
    `-sum_k (1 - p)^k / k`; REINFORCE has the first.

    Source: MaxRL (arXiv 2602.02710), with the mean as the baseline.
    Use: scores of 0 and 1, many hard prompts: the fewer right answers, the more each weighs.
    """
    mean = group_mean(scored.scores, scored.groups)
    return ((scored.scores - mean) / mean).where(mean > 0, 0.0)


def gdpo(scored: Scored, *, reward_weights: Mapping[str, float]) -> Tensor:
    """Normalise each reward in its group, add up with weights, and normalise over the batch.

        A_ik = (r_ik - mean(r_gk)) / (std(r_gk) + 1e-6);   A'_i = sum_k w_k A_ik
        A_i = (A'_i - mean_batch(A')) / (std_batch(A') + 1e-6)

    Source: GDPO (arXiv 2601.05242); deviations with Bessel's correction.
    Keys: `reward_weights`: w_k, by part of the verdict.
    Use: several rewards of one answer, such as those of `CompositeReward`. In their sum (GRPO) the one that varies most
    decides.
    """
    assert scored.terms is not None, "gdpo needs the parts of every verdict"
    each = [weight * grpo(replace(scored, scores=scored.terms[name]), norm_std=True)
            for name, weight in reward_weights.items()]  # fmt: skip
    total, batch = torch.stack(each).sum(0), torch.zeros_like(scored.groups)
    return (total - group_mean(total, batch)) / (group_std(total, batch) + EPSILON)


def pass_at_k(scored: Scored, *, pass_k: int, pass_score: float) -> Tensor:
    """Reward at least one right answer among k, in closed form over all subsets of the group.

        R = 1 - C(w, k) / C(n, k),   s = sqrt(R (1 - R)),   w wrong answers of n
        A_right = (1 - R) / s,   A_wrong = (1 - R - C(w - 1, k - 1) / C(n - 1, k - 1)) / s

    Source: Pass@k Training (arXiv 2508.10751, the analytical derivation).
    Keys: `pass_k`: k; `pass_score`: least score of a right answer.
    Use: pass@1 training narrows the answers. A group all right or all wrong gets 0, and so does one of at most `pass_k`
    answers.
    """
    right = scored.scores >= pass_score
    counts = group_sum(torch.ones_like(scored.scores), scored.groups)
    wrong = group_sum((~right).to(scored.scores.dtype), scored.groups)
    none_right = torch.ones_like(counts)  # C(w, k) / C(n, k)
    none_right_beside = torch.ones_like(counts)  # the same for the k - 1 others of a subset with a wrong answer
    for drawn in range(pass_k):
        share = ((wrong - drawn).clamp(min=0) / (counts - drawn).clamp(min=1)).where(drawn < counts, 1.0)
        none_right = none_right * share
        none_right_beside = none_right_beside * share if drawn else none_right_beside
    deviation = (none_right * (1 - none_right)).sqrt()
    advantage = torch.where(right, none_right, none_right - none_right_beside)
    return (advantage / deviation).where(deviation > 0, 0.0)
