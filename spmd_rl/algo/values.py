"""The loss of a critic, and its explained variance. `advantages/tokens.py` computes its targets, the returns."""

import torch
from torch import Tensor

from spmd_rl.algo.moments import Moments


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the critic's squared error, with values clipped around the old ones.

        L_t = 1/2 max( (V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2 )

    Source: Implementation Matters in Deep Policy Gradients (arXiv 2005.12729, section 3).
    Keys: `value_clip`: c; null does not clip.
    Use: with a critic (`gae`).

    All float [N]; only `values` carries gradient. Returns the loss per token and `critic/clipfrac`: 1 where the clipped
    error is larger.
    """
    plain = (values - returns).square()
    if value_clip is None:
        return plain / 2, {"critic/clipfrac": torch.zeros_like(plain)}
    clipped = (old_values + (values - old_values).clamp(-value_clip, value_clip) - returns).square()
    return torch.maximum(plain, clipped) / 2, {"critic/clipfrac": (clipped > plain).to(values.dtype)}


def explained_variance(errors: Moments, returns: Moments) -> float:
    """Return the share of the returns' variance that the critic explains; below 0: worse than a constant.

        EV = 1 - Var(R - V) / Var(R)

    Source: coefficient of determination (Wright 1921).
    Use: `critic/explained_variance`; a critic below 0 should warm up longer.

    errors: moments of R - V; returns: moments of R, both over the global batch. 0 if returns do not vary.
    """
    return 1 - errors.variance / returns.variance if returns.variance > 0 else 0.0
