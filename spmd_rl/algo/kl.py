"""Estimators of KL(policy || reference) from the logprobs of sampled tokens (Schulman, Approximating KL Divergence)."""

from torch import Tensor


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log(p/q): unbiased, high variance, can be negative; as a loss its gradient is 0 in expectation. float32 [N]."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log(p/q)^2 / 2: its gradient is that of the KL in expectation. float32 [N]."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, never negative. The exponent is clamped to +-10. float32 [N]."""
    difference = (reference - logprobs).clamp(-10, 10)
    return difference.exp() - difference - 1
