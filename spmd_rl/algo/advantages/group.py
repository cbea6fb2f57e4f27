"""Advantages from one score per sample, compared with the other answers to the same prompt.

Each takes the metadata of the whole global batch and gives float64 [n]. A sample whose verdict is no score is not in
it, so it is in nobody's baseline. Where a group has one answer, or all scores are equal, the advantage is exactly 0
unless said otherwise.
"""

import torch
from torch import Tensor

from spmd_rl.algo.groups import EPSILON, group_mean, group_mean_std, group_std, group_sum
from spmd_rl.algo.inputs import Scored


def grpo(scored: Scored, *, norm_std: bool) -> Tensor:
    """Group-relative advantage: a score minus its group's mean, over the group's standard deviation.

        A_i = (r_i - mean(r_g)) / (std(r_g) + 1e-6)

    Source: DeepSeekMath (arXiv 2402.03300, section 4.1.2); std with Bessel's correction.
    Keys: `norm_std`: divide by the standard deviation (false: Dr.GRPO).
    Use: the default, for verifiable rewards with several answers per prompt.
    """
    if not norm_std:
        return scored.scores - group_mean(scored.scores, scored.groups)
    mean, std = group_mean_std(scored.scores, scored.groups)
    return (scored.scores - mean) / (std + EPSILON)


def dr_grpo(scored: Scored) -> Tensor:
    """GRPO without the division by the standard deviation, which favours prompts that are nearly always right or wrong.

        A_i = r_i - mean(r_g)

    Source: Understanding R1-Zero-Like Training (arXiv 2503.20783, section 3.2).
    Use: with the aggregation `seq-mean-token-sum-norm`, which leaves the length bias out as well.
    """
    return grpo(scored, norm_std=False)


def rloo(scored: Scored) -> Tensor:
    """REINFORCE with the mean of the *other* answers as baseline, so that the baseline is unbiased.

        A_i = r_i - sum_{j != i} r_j / (n_g - 1) = n_g / (n_g - 1) * (r_i - mean(r_g))

    Source: Back to Basics (arXiv 2402.14740, RLOO).
    Use: as `grpo`, where the size of a score should keep its meaning. A group of one has no others: 0.
    """
    counts = group_sum(torch.ones_like(scored.scores), scored.groups)
    return grpo(scored, norm_std=False) * counts / (counts - 1).clamp(min=1)


def reinforce(scored: Scored) -> Tensor:
    """The score itself, with no baseline.

        A_i = r_i

    Source: Simple Statistical Gradient-Following Algorithms (Williams 1992, REINFORCE).
    Use: scores are normalised (`norm_mean_type`, `norm_std_type`), or to see what a baseline buys. Equal scores keep
    their size.
    """
    return scored.scores.clone()


def reinforce_pp_baseline(scored: Scored) -> Tensor:
    """The group's mean as baseline, then whitened over all tokens of the batch instead of the group.

        A'_i = r_i - mean(r_g);   A_i = (A'_i - mean_tokens(A')) / (std_tokens(A') + 1e-6)

    Source: REINFORCE++ (arXiv 2501.03262, REINFORCE++-baseline). A sample counts as often as it has tokens.
    Use: as `grpo`, where groups are small or their standard deviation is often near 0.
    """
    centred, batch = grpo(scored, norm_std=False), torch.zeros_like(scored.groups)
    mean, std = group_mean_std(centred, batch, scored.lengths.clamp(min=1))
    return (centred - mean) / (std + EPSILON)


def remax(scored: Scored) -> Tensor:
    """The score of the greedy answer to the same prompt as baseline.

        A_i = r_i - r(greedy answer)

    Source: ReMax (arXiv 2310.10505).
    Use: one answer per prompt; a greedy one more is generated for each. Equal scores give
    0 only where the greedy answer has them too.
    """
    assert scored.greedy is not None, "remax needs the score of a greedy answer for every prompt"
    return scored.scores - scored.greedy


def opo(scored: Scored) -> Tensor:
    """The baseline of least variance for exact on-policy training, each score weighted by its length.

        A_i = r_i - b_g,   b_g = sum_j l_j r_j / sum_j l_j

    Source: On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585).
    Use: strictly on policy (one update a step), without KL and entropy terms. An empty answer counts as one token.
    """
    return scored.scores - group_mean(scored.scores, scored.groups, scored.lengths.clamp(min=1))


def lite_ppo(scored: Scored) -> Tensor:
    """The group's mean, the batch's standard deviation.

        A_i = (r_i - mean(r_g)) / (std(r_batch) + 1e-6)

    Source: Part I: Tricks or Traps? (arXiv 2508.08221, group mean and batch std); std with Bessel's correction.
    Use: with token-mean aggregation and no KL; robust where many groups are nearly all right or all wrong.
    """
    std = group_std(scored.scores, torch.zeros_like(scored.groups))
    return grpo(scored, norm_std=False) / (std + EPSILON)


def pass_at_k(scored: Scored, *, pass_k: int, pass_score: float) -> Tensor:
    """Reward for at least one right answer among k, in closed form over all subsets of k of the group.

        R = 1 - C(w, k) / C(n, k),   s = sqrt(R (1 - R)),   w wrong answers of n
        A_right = (1 - R) / s,   A_wrong = (1 - R - C(w - 1, k - 1) / C(n - 1, k - 1)) / s

    Source: Pass@k Training (arXiv 2508.10751, the analytical derivation).
    Keys: `pass_k`: size of a subset, k; `pass_score`: a score of at least this is right.
    Use: to keep exploring where pass@1 training narrows the answers. A group all right or all wrong gets 0, and so
    does one of at most `pass_k` answers, which has only one subset.
    """
    right = scored.scores >= pass_score
    counts = group_sum(torch.ones_like(scored.scores), scored.groups)
    wrong = group_sum((~right).to(scored.scores.dtype), scored.groups)
    none_right = torch.ones_like(counts)  # C(w, k) / C(n, k)
    none_right_beside = torch.ones_like(counts)  # the same of a wrong answer's k - 1 companions
    for drawn in range(pass_k):
        share = ((wrong - drawn).clamp(min=0) / (counts - drawn).clamp(min=1)).where(drawn < counts, 1.0)
        none_right = none_right * share
        none_right_beside = none_right_beside * share if drawn else none_right_beside
    deviation = (none_right * (1 - none_right)).sqrt()
    advantage = torch.where(right, none_right, none_right - none_right_beside)
    return (advantage / deviation).where(deviation > 0, 0.0)
