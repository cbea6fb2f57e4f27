"""Estimators of KL(policy || reference) from the logprobs of sampled tokens, and the adaptive KL coefficient.

The estimators take float [N], natural logs, of which only `logprobs` carries gradient, and give float [N]. Any will do
in the reward; *in the loss* their gradients differ (arXiv 2506.09477). A reference that gives a sampled token no
probability makes all of them infinite: the update is then skipped, not hidden.
"""

import torch
from torch import Tensor


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the KL by the log ratio: unbiased, with high variance, negative for single tokens.

        KL_t = log p - log q

    Source: Approximating KL Divergence (Schulman 2020, k1).
    Use: in the reward, where it has the KL's true gradient. In the loss its gradient is 0 in expectation.
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the KL by half the squared log ratio: biased, with low variance, never negative (ROLL's `mse`).

        KL_t = (log p - log q)^2 / 2

    Source: Approximating KL Divergence (Schulman 2020, k2).
    Use: in the loss; on policy its gradient is that of the KL in expectation.
    """
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the KL by the log ratio with a control variate: unbiased, with low variance, never negative.

        KL_t = q / p - 1 - log(q / p), at most 10 where q > p

    Source: Approximating KL Divergence (Schulman 2020, k3); GRPO (arXiv 2402.03300, eq. 4). The bound is that of verl,
    ROLL and OpenRLHF: beyond it, from log(q / p) of 2.6 on, a token passes no gradient.
    Use: in the loss, as GRPO has it. On policy its gradient is that of KL(q || p) in expectation.
    """
    difference = reference - logprobs
    found = difference.clamp(max=10).exp() - difference - 1
    return torch.where(difference > 0, found.clamp(max=10), found)


def k_abs(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the KL by the absolute log ratio: biased, never negative (ROLL's `abs`).

        KL_t = |log p - log q|

    Source: none; common in PPO code since Ziegler et al. (arXiv 1909.08593).
    Use: in the reward, against single tokens far off.
    """
    return (logprobs - reference).abs()


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": k_abs}
"""Estimators by name: float [N], float [N] -> float [N]"""


def adaptive_coef(coef: float, kl: float, num_samples: int, *, target_kl: float, kl_horizon: float) -> float:
    """Return the next coefficient of the KL penalty: raised if the KL is above its target, lowered if it is below.

        beta' = beta * (1 + clip(KL / target_kl - 1, -0.2, 0.2) * num_samples / kl_horizon)

    Source: Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593, section 2.2).
    Keys: `target_kl`: nats per answer; null leaves the coefficient fixed; `kl_horizon`: samples over which it may move
    by a fifth.
    Use: the right coefficient is not known but the distance that the policy may go is.

    kl: mean over the step's samples of the KL summed over tokens, of the global batch; num_samples: of the step. The
    coefficient is the whole state.
    """
    return coef * (1 + min(max(kl / target_kl - 1, -0.2), 0.2) * num_samples / kl_horizon)
