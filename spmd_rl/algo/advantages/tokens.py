"""Advantages from one reward per token: with a critic, with a discount, or with the KL penalty in the reward.

The functions take the N sampled tokens of whole samples, packed in order; the result of a sample does not depend on
those it is packed with. A truncated answer counts as ended: nothing is bootstrapped after its last token.
"""

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


def token_rewards(scores: Tensor, samples: Tensor, kl: Tensor | None = None, kl_reward_coef: float = 0.0) -> Tensor:
    """Return one reward per token: the score at the last token of the sample, minus the KL penalty of each token.

        r_t = [t is last] * score - kl_reward_coef * KL_t

    Source: Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593, eq. 2), token by token.
    Use: before any token-level estimator.

    scores: float [S]; samples: int64 [N], all of 0..S-1; kl: float [N]. Returns [N], dtype of `scores`.
    """
    rewards = scores[samples] * _last(samples)
    return rewards if kl is None else rewards - kl_reward_coef * kl


def gae(rewards: Tensor, values: Tensor, samples: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Estimate generalised advantages over the tokens of an answer, with a critic.

        d_t = r_t + gamma V_{t+1} - V_t;   A_t = d_t + gamma lam A_{t+1};   R_t = A_t + V_t
        (V and A are 0 past the end)

    Source: High-Dimensional Continuous Control Using Generalized Advantage Estimation (arXiv 1506.02438, eq. 16).
    Keys: `gamma`: the discount from one token to the next; `lam`: the weight of the longer estimates.
    Use: PPO with a critic. `lam` 1 has none of the critic's bias and all of the variance.

    rewards, values: float [N]; samples: int64 [N], non-decreasing. Returns advantages [N] and returns [N], the critic's
    targets.
    """
    follows = torch.zeros_like(values)
    follows[:-1] = values[1:]
    errors = rewards + gamma * follows * ~_last(samples) - values
    advantages = discounted_sums(errors, samples, gamma * lam)
    return advantages, advantages + values


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    samples: Tensor,
    turns: Tensor | None = None,
    *,
    step_reward_gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Estimate generalised advantages over the turns of an agent, with a critic: one for all tokens of a turn.

        d_k = r_k + gamma V_{k+1} - V_k;   A_k = d_k + gamma lam A_{k+1};   R_k = A_k + V_k
        (r_k: the sum over the turn's tokens; V_k: the value before its first token; V and A are 0 past the end)

    Source: VAGEN (arXiv 2510.16907), the turn level of its bi-level advantages; over tokens: arXiv 1506.02438, eq. 16.
    Keys: `step_reward_gamma`: the discount from one turn to the next; `lam`: the weight of the longer estimates.
    Use: PPO for agents of many turns, whose length in tokens should neither discount nor blur what a turn is worth.

    rewards, values: float [N]; samples, turns: int64 [N], non-decreasing; turns: default, each sample is one. Returns
    advantages [N] and returns [N], the critic's targets, the same at all tokens of a turn.
    """
    number = torch.unique_consecutive(samples if turns is None else turns, return_inverse=True)[1]
    first = torch.ones_like(number, dtype=torch.bool)
    first[1:] = number[1:] != number[:-1]
    sums = torch.zeros_like(values[first]).index_add(0, number, rewards)
    advantages, returns = gae(sums, values[first], samples[first], gamma=step_reward_gamma, lam=lam)
    return advantages[number], returns[number]


def reinforce_returns(
    rewards: Tensor, values: Tensor | None, samples: Tensor, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """Take the discounted return from each token on, without a critic.

        A_t = R_t = r_t + gamma R_{t+1}

    Source: Simple Statistical Gradient-Following Algorithms (Williams 1992, REINFORCE). With `whiten_advantages` and
    the KL in the reward it is REINFORCE++ (arXiv 2501.03262).
    Keys: `gamma`: the discount from one token to the next.
    Use: rewards are per token (KL in the reward), or early tokens should count less (gamma < 1).

    `values` are not used. Shapes as in `gae`.
    """
    returns = discounted_sums(rewards, samples, gamma)
    return returns, returns


def _last(samples: Tensor) -> Tensor:
    """Return whether each token is the last of its sample, bool [N]."""
    last = torch.ones_like(samples, dtype=torch.bool)
    last[:-1] = samples[1:] != samples[:-1]
    return last
