"""Losses of the form -(detached weight) A log pi: the policy gradient and its importance-weighted variants.

No clip removes the gradient of a token; its weight is bounded instead. Only the gradient of such a loss has a meaning,
not its value. Shapes are those of `clipped.py`.
"""

import torch

from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.policy.clipped import Loss
from spmd_rl.algo.policy.ratios import log_ratios, quantities, run_sums, token_ratios


def vanilla_pg(tokens: Tokens) -> Loss:
    """The policy gradient itself: no ratio, no bound.

        L_t = -A_t log pi(t)

    Source: Simple Statistical Gradient-Following Algorithms (Williams 1992, REINFORCE); Policy Gradient Methods for
    Reinforcement Learning (Sutton et al. 2000, theorem 1).
    Use: exactly one update per batch of fresh samples; the yardstick of every other loss.
    """
    return -tokens.advantages * tokens.logprobs, quantities(tokens, token_ratios(tokens))


def tis(tokens: Tokens) -> Loss:
    """Truncated importance sampling: the policy gradient, weighted by the ratio up to 1.

        L_t = -sg[min(r_t, 1)] A_t log pi(t)

    Source: IMPALA (arXiv 1802.01561, eq. 1, truncation at 1); for language models: TOPR (arXiv 2503.14286), which
    compares with it.
    Use: samples of an older policy, where no token should gain weight from having become likelier.
    """
    ratio = token_ratios(tokens).detach()
    weight = ratio.clamp(max=1)
    return -weight * tokens.advantages * tokens.logprobs, quantities(tokens, weight, ratio > 1)


def cispo(tokens: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """CISPO: the ratio is clipped as a weight, so no token drops out of the gradient.

        L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log pi(t)

    The paper's optional token mask (its eq. 7) makes the gradient PPO's: that is `ppo_clip`.

    Source: MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5), under `token-mean`.
    Keys: `clip_low`, `clip_high`: the band of the weight; the paper leaves the lower bound off (`clip_low` 1) and tunes
    the upper; ScaleRL (arXiv 2510.13786) caps the weight at 5 (`clip_high` 4).
    Use: rare, decisive tokens (forks of the reasoning) move far in one update and PPO would cut them first.
    """
    ratio = token_ratios(tokens).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * tokens.advantages * tokens.logprobs, quantities(tokens, ratio, weight != ratio)


def topr(tokens: Tokens) -> Loss:
    """TOPR: positive tokens learn as in supervised training, negative ones fade as their sample becomes unlikely.

        L_t = -A_t log pi(t)                        where A_t >= 0
        L_t = -sg[min(R_i, 1)] A_t log pi(t)        where A_t < 0;    R_i = product over t in i of r_t

    R_i is the ratio of the whole sample, not length-normalised: it is computed as exp(min(sum of log r_t, 0)).

    Source: Tapered Off-Policy REINFORCE (arXiv 2503.14286, eq. 8), under `seq-mean-token-sum`.
    Use: off-policy or offline samples, wrong answers included, without a KL term. The baseline in A sets the balance
    of right and wrong answers.
    """
    sample = run_sums(log_ratios(tokens).detach(), tokens.samples)
    weight = torch.where(tokens.advantages < 0, sample.clamp(max=0).exp(), torch.ones_like(sample))
    clipped = (tokens.advantages < 0) & (sample > 0)
    return -weight * tokens.advantages * tokens.logprobs, quantities(tokens, weight, clipped)
