"""Advantages of agents, where each step of a trajectory is a sample with a separate reward.

`Scored.scores` are the rewards of the steps. Where `trajectories` and `steps` are None, a sample is a trajectory of one
step. Steps without a score are skipped; discounts use the true distance of the others.
"""

from dataclasses import replace

import torch
from torch import Tensor

from spmd_rl.algo.advantages.group import grpo
from spmd_rl.algo.advantages.tokens import discounted_sums
from spmd_rl.algo.inputs import Scored


def starpo(scored: Scored, *, norm_std: bool, norm_over_steps: bool) -> Tensor:
    """Compare a trajectory's return with those of its group, for all of its steps. The authors' runs also have
    `kl_coef=0.001` and `entropy_coef=0.001`; the defaults are 0.

        R(tau) = sum_t r_t;   A = (R - mean(R_g)) / (std(R_g) + 1e-6)

    Source: RAGEN (arXiv 2504.20073, StarPO with GRPO).
    Keys: `norm_std`: divide by the standard deviation; `norm_over_steps`: in mean and deviation a trajectory counts
    once per step (false: once).
    Use: a reward at the end. A group of one gets 0.
    """
    trajectories, index = torch.unique(_trajectories(scored), return_inverse=True)
    totals = torch.zeros(len(trajectories), dtype=scored.scores.dtype).index_add(0, index, scored.scores)
    groups = torch.zeros(len(trajectories), dtype=torch.int64).scatter(0, index, scored.groups)
    if norm_over_steps:
        return grpo(replace(scored, scores=totals[index]), norm_std=norm_std)
    return grpo(Scored(totals, groups, torch.ones_like(groups)), norm_std=norm_std)[index]


def step_reinforce(scored: Scored, *, step_reward_gamma: float) -> Tensor:
    """Use the discounted return from each step on, without a baseline.

        R_t = sum_{s >= t} gamma^(s - t) r_s

    Source: REINFORCE (Williams 1992), over steps.
    Keys: `step_reward_gamma`: discount per step.
    Use: rewards on the way; whiten the advantages.
    """
    trajectories = _trajectories(scored)
    steps = torch.zeros_like(trajectories) if scored.steps is None else scored.steps
    order = torch.argsort(steps, stable=True)
    order = order[torch.argsort(trajectories[order], stable=True)]
    sums = discounted_sums(scored.scores[order], trajectories[order], step_reward_gamma, steps[order])
    return torch.empty_like(sums).scatter(0, order, sums)


def gigpo(
    scored: Scored,
    *,
    norm_std: bool,
    norm_over_steps: bool,
    step_reward_gamma: float,
    episode_reward_weight: float,
    step_reward_weight: float,
) -> Tensor:
    """Compare trajectories in their group, and steps with the group's steps from the same state. The authors' scripts
    also have `kl_coef=0.01` and `norm_over_steps=true`; the defaults are 0 and false.

        A = w_e * GRPO(R(tau) in the group) + w_s * GRPO(R_t among equal states),   R_t as in `step_reinforce`

    Source: GiGPO (arXiv 2505.10978, A = A^E + w A^S).
    Keys: `episode_reward_weight`, `step_reward_weight`: w_e and w_s; `step_reward_gamma`: discount of R_t; `norm_std`:
    divide by deviations (false: the paper's F_norm = 1); `norm_over_steps`: as in `starpo` (true: verl-agent's and
    ROLL's default).
    Use: many steps, of which single ones need credit. A state that occurs once has a step part of 0.
    """
    assert scored.states is not None, (
        "gigpo needs the states before the steps, which only python -m spmd_rl.agentic records"
    )
    returns = step_reinforce(scored, step_reward_gamma=step_reward_gamma)
    step = grpo(Scored(returns, scored.states, scored.lengths), norm_std=norm_std)
    episode = starpo(scored, norm_std=norm_std, norm_over_steps=norm_over_steps)
    return episode_reward_weight * episode + step_reward_weight * step


def _trajectories(scored: Scored) -> Tensor:
    return torch.arange(len(scored.scores)) if scored.trajectories is None else scored.trajectories
