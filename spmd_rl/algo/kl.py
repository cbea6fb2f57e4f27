"""Estimators of KL(policy || reference) from the logprobs of sampled tokens, and the adaptive KL coefficient.

Estimators map float [N], in nats, to float [N]; only `logprobs` carries gradient. *In the loss* their gradients differ
(arXiv 2506.09477). If the reference gives a sampled token no probability, all are infinite, and the update is skipped.
"""

import torch
from torch import Tensor


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate by the log ratio: unbiased, high variance, negative for single tokens.

        KL_t = log p - log q

    Source: Approximating KL Divergence (Schulman 2020, k1).
    Use: in the reward, with the KL's true gradient. In the loss its expected gradient is 0.
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate by half the squared log ratio: biased, low variance, never negative (ROLL's `mse`).

        KL_t = (log p - log q)^2 / 2

    Source: Approximating KL Divergence (Schulman 2020, k2).
    Use: in the loss; on policy its expected gradient is the KL's.
    """
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate by the log ratio with a control variate: unbiased, low variance, never negative.

        KL_t = q / p - 1 - log(q / p), at most 10 where q > p

    Source: Approximating KL Divergence (Schulman 2020, k3); GRPO (arXiv 2402.03300, eq. 4). The bound is verl's, ROLL's
    and OpenRLHF's: from log(q / p) of 2.6 on, a token passes no gradient.
    Use: in the loss, as in GRPO. On policy its expected gradient is that of KL(q || p).
    """
    difference = reference - logprobs
    found = difference.clamp(max=10).exp() - difference - 1
    return torch.where(difference > 0, found.clamp(max=10), found)


def k_abs(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate by the absolute log ratio: biased, never negative (ROLL's `abs`).

        KL_t = |log p - log q|

    Source: none; common in PPO code since Ziegler et al. (arXiv 1909.08593).
    Use: in the reward, against outlier tokens.
    """
    return (logprobs - reference).abs()


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": k_abs}


def adaptive_coef(coef: float, kl: float, num_samples: int, *, target_kl: float, kl_horizon: float) -> float:
    """Return the next KL coefficient: raised above the target, lowered below it.

        beta' = beta * (1 + clip(KL / target_kl - 1, -0.2, 0.2) * num_samples / kl_horizon)

    Source: Ziegler et al. (arXiv 1909.08593, section 2.2).
    Keys: `target_kl`: nats per answer (null: fixed coefficient); `kl_horizon`: samples in which it may move by a fifth.
    Use: the allowed distance is known, the coefficient is not.

    kl: summed over tokens, mean over the global batch's samples; num_samples: of the step.
    """
    return coef * (1 + min(max(kl / target_kl - 1, -0.2), 0.2) * num_samples / kl_horizon)
