"""Losses without a hard clip per token: a soft gate, a geometric mean, a squared penalty. Shapes as in `clipped.py`."""

import torch

from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.policy.clipped import Loss
from spmd_rl.algo.policy.ratios import log_ratios, quantities, run_means, run_sums, safe_exp, token_ratios


def sapo(tokens: Tokens, *, sapo_tau_pos: float, sapo_tau_neg: float) -> Loss:
    """SAPO: a sigmoid gate fades a token's gradient as its ratio leaves 1.

        L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t,    tau = sapo_tau_pos where A_t > 0, else sapo_tau_neg

    At r = 1 the gradient is the policy gradient's, for any tau.

    Source: SAPO (arXiv 2511.20347), under `seq-mean-token-mean`.
    Keys: `sapo_tau_pos`, `sapo_tau_neg`: steepness of the gate, > 0; the paper takes 1 and 1.05: a negative advantage
    lifts many unsampled tokens.
    Use: hard clipping stalls; mixtures of experts.
    """
    ratio = token_ratios(tokens)
    tau = torch.full_like(ratio, sapo_tau_neg).masked_fill(tokens.advantages > 0, sapo_tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return -gate * tokens.advantages, quantities(tokens, ratio)


def gmpo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """GMPO: the geometric mean of a sample's clipped token ratios.

        L_t = -A_i exp(mean over t in i of l_t),    l_t = s min(s log r_t, s clip(log r_t, -clip_low, clip_high)),
        s = sign(A_i),    A_i = mean over t in i of A_t

    Each token has the sample's value, so `seq-mean-token-mean` gives the paper's objective.

    Source: GMPO (arXiv 2507.20673).
    Keys: `clip_low`, `clip_high`: the band of the *log* ratio; the paper takes 0.4 and 0.4.
    Use: outlier ratios disturb GRPO; a wider band than PPO's stays stable.
    """
    log_ratio = log_ratios(tokens)
    advantages = run_means(tokens.advantages, tokens.samples)
    sign = advantages.sign()
    plain, banded = sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high)
    ratio = safe_exp(run_means(sign * torch.minimum(plain, banded), tokens.samples))
    return -ratio * advantages, quantities(tokens, ratio, banded < plain)


def kimi(tokens: Tokens, *, kimi_tau: float) -> Loss:
    """Kimi k1.5's mirror descent: the policy gradient and a squared pull of each sample towards the old policy.

        L_t = -A_t log pi(t) + (kimi_tau / 2) D_i^2 / |i|,    D_i = sum over t in i of log r_t

    The pull is spread over the sample's |i| tokens, so `seq-mean-token-sum` gives the paper's objective.

    Source: Kimi k1.5 (arXiv 2501.12599, eq. 3), with A the score minus its group's mean.
    Keys: `kimi_tau`: weight of the pull, >= 0.
    Use: several updates on one batch, regularised instead of clipped.
    """
    log_ratio = log_ratios(tokens)
    squares = run_means(log_ratio, tokens.samples) * run_sums(log_ratio, tokens.samples)
    loss = -tokens.advantages * tokens.logprobs + kimi_tau / 2 * squares
    return loss, quantities(tokens, token_ratios(tokens))
