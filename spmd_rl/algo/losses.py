"""Policy losses, one value per sampled token. Weighting and summing are the caller's (see `aggregation.py`)."""

import torch
from torch import Tensor


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old logprob).

    PPO (arXiv 1707.06347, eq. 7); `clip_high` above `clip_low` is DAPO's clip-higher (arXiv 2503.14476).
    All tensors float32 [N]; only `logprobs` carries gradient. Returns the loss per token and, per token,
    `actor/approxkl` (k3 of old against new) and `actor/clipfrac` (1 where the clip took the gradient away).
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    with torch.no_grad():
        quantities = {
            "actor/approxkl": torch.expm1(log_ratio) - log_ratio,
            "actor/clipfrac": (clipped < plain).float(),
        }
    return -torch.minimum(plain, clipped), quantities
