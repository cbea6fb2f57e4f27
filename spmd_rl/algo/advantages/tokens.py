"""Advantages from one reward per token: with a critic, with a discount, or with the KL penalty in the reward.

The functions take the N sampled tokens of whole samples, packed in order; packing does not change results. A truncated
answer counts as ended: nothing is bootstrapped after its last token.
"""

import torch
from torch import Tensor


def discounted_sums(values: Tensor, samples: Tensor, gamma: float, positions: Tensor | None = None) -> Tensor:
    """Return the discounted sum from each token to the end of its sample.

        y_t = sum over s >= t of the same sample of gamma^(position_s - position_t) * values_s

    values: float [N]; samples: int64 [N], non-decreasing; positions: int64 [N], rising within a sample (default: one
    apart). Returns [N], dtype of `values`.
    """
    positions = torch.arange(len(values), device=values.device) if positions is None else positions
    # Pass k adds the sum that starts 2^k tokens later: log2(L) passes for a sample of L tokens, and no effect of its
    # neighbours.
    sums, reach = values, 1
    while reach < len(values) and bool((same := samples[reach:] == samples[:-reach]).any()):
        # Across samples the distance may be negative, and 0^-1 is infinite.
        distance = (positions[reach:] - positions[:-reach]) * same
        factor = torch.pow(gamma, distance.to(values.dtype)) * same
        sums = torch.cat([sums[:-reach] + factor * sums[reach:], sums[-reach:]])
        reach *= 2
    return sums


def token_rewards(scores: Tensor, samples: Tensor, kl: Tensor | None = None, kl_reward_coef: float = 0.0) -> Tensor:
    """Return the score at a sample's last token, minus the KL penalty of each token.

        r_t = [t is last] * score - kl_reward_coef * KL_t

    Source: Ziegler et al. (arXiv 1909.08593, eq. 2), token by token.
    Use: before any token-level estimator.

    scores: float [S]; samples: int64 [N], all of 0..S-1; kl: float [N]. Returns [N], dtype of `scores`.
    """
    rewards = scores[samples] * _last(samples)
    return rewards if kl is None else rewards - kl_reward_coef * kl


def gae(rewards: Tensor, values: Tensor, samples: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Estimate generalised advantages over tokens, with a critic.

        d_t = r_t + gamma V_{t+1} - V_t;   A_t = d_t + gamma lam A_{t+1};   R_t = A_t + V_t
        (V and A are 0 past the end)

    Source: GAE (arXiv 1506.02438, eq. 16).
    Keys: `gamma`: discount per token; `lam`: weight of the longer estimates.
    Use: PPO with a critic. `lam` 1: no bias of the critic, full variance.

    rewards, values: float [N]; samples: int64 [N], non-decreasing. Returns advantages [N] and returns [N] (the critic's
    targets).
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
    """Estimate generalised advantages over an agent's turns, with a critic: one for all tokens of a turn.

        d_k = r_k + gamma V_{k+1} - V_k;   A_k = d_k + gamma lam A_{k+1};   R_k = A_k + V_k
        (r_k: the sum over the turn's tokens; V_k: the value before its first token; V and A are 0 past the end)

    Source: VAGEN (arXiv 2510.16907), turn level; GAE (arXiv 1506.02438, eq. 16).
    Keys: `step_reward_gamma`: discount per turn; `lam`: as in `gae`.
    Use: PPO for agents of many turns, whose length in tokens should not discount.

    rewards, values: float [N]; samples, turns: int64 [N], non-decreasing; turns: default, each sample is one. Returns
    as `gae`.
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
    """Use the discounted return from each token on, without a critic.

        A_t = R_t = r_t + gamma R_{t+1}

    Source: REINFORCE (Williams 1992). With `whiten_advantages` and the KL in the reward it is REINFORCE++ (arXiv
    2501.03262).
    Keys: `gamma`: discount per token.
    Use: rewards per token (KL in the reward).

    `values` is ignored. Shapes as in `gae`.
    """
    returns = discounted_sums(rewards, samples, gamma)
    return returns, returns


def _last(samples: Tensor) -> Tensor:
    last = torch.ones_like(samples, dtype=torch.bool)
    last[:-1] = samples[1:] != samples[:-1]
    return last
