"""Losses that restrain the few tokens which lower the entropy most.

`Tokens.marked` selects them over the *global* batch before the update (`algo/selection.py`). Shapes are those of
`clipped.py`.
"""

from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.policy.clipped import Loss, surrogate
from spmd_rl.algo.policy.ratios import log_ratios, quantities, token_ratios


def clip_cov(tokens: Tokens, *, clip_low: float, clip_high: float) -> Loss:
    """Clip-Cov: PPO's clipped surrogate, without the gradient of the marked tokens.

        L_t = 0 where t is marked, else -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    Marked is a random `clip_cov_ratio` of all tokens, among those with a covariance in (`clip_cov_low`,
    `clip_cov_high`). They are marked once a step, by the old logprobs. The authors mark in every forward pass, and skip
    clipped tokens: the same in a step's first update.

    Source: Clip-Cov (arXiv 2505.22617).
    Keys: `clip_low`, `clip_high`: as in `ppo_clip`; the authors set 1 and 1.
    Use: entropy collapses early, and scores stop rising.
    """
    assert tokens.marked is not None, "clip-cov needs its tokens marked"
    ratio = token_ratios(tokens)
    objective, clipped = surrogate(ratio, tokens.advantages, clip_low, clip_high)
    return -objective.masked_fill(tokens.marked, 0), quantities(tokens, ratio, clipped | tokens.marked)


def kl_cov(tokens: Tokens, *, kl_cov_coef: float) -> Loss:
    """KL-Cov: the importance-weighted policy gradient, with a pull to the old policy on marked tokens.

        L_t = -r_t A_t + kl_cov_coef |log r_t| where t is marked, else -r_t A_t

    Marked are the `kl_cov_ratio` of all tokens with the largest covariance, once a step as in `clip_cov`. |log r_t| is
    the authors' estimate of the divergence.

    Source: KL-Cov (arXiv 2505.22617).
    Keys: `kl_cov_coef`: weight of the pull, >= 0; the paper takes 1.
    Use: as `clip_cov`, with less variance between runs; a step's first update is the policy gradient.
    """
    assert tokens.marked is not None, "kl-cov needs its tokens marked"
    ratio = token_ratios(tokens)
    pull = kl_cov_coef * log_ratios(tokens).abs() * tokens.marked
    return -ratio * tokens.advantages + pull, quantities(tokens, ratio, tokens.marked)
