"""Importance ratios of the policy losses, per token and over runs of tokens (samples, segments).

A ratio is exp(log ratio), the log clamped to +-20: it lies within [2e-9, 5e8] and does not overflow in float32. A token
beyond the clamp passes no gradient through its ratio.
"""

import torch
from torch import Tensor

from spmd_rl.algo.inputs import Tokens

LOG_RATIO_LIMIT = 20.0


def log_ratios(tokens: Tokens) -> Tensor:
    """Return log(pi / pi_old) of each token, float [N], with gradient."""
    return tokens.logprobs - tokens.old_logprobs


def safe_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the clamped log ratio, of any shape."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def token_ratios(tokens: Tokens) -> Tensor:
    """Return pi / pi_old of each token, float [N], with gradient."""
    return safe_exp(log_ratios(tokens))


def run_sums(values: Tensor, runs: Tensor) -> Tensor:
    """Return the sum over each token's run.

    values: float [N]; runs: int64 [N], equal neighbours are one run (`Tokens.samples` or `.segments`). Returns [N].
    """
    sums, index, _ = _sums(values, runs)
    return sums[index]


def run_means(values: Tensor, runs: Tensor) -> Tensor:
    """Return the mean over each token's run. Shapes are those of `run_sums`."""
    sums, index, counts = _sums(values, runs)
    return (sums / counts)[index]


def _sums(values: Tensor, runs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    begins = torch.ones_like(runs)
    begins[1:] = runs[1:] != runs[:-1]
    index = begins.cumsum(0) - 1
    # Room for as many runs as there are tokens: a device would have to be waited for to know how many there are.
    counts = torch.zeros_like(runs).index_add(0, index, torch.ones_like(runs)).clamp(min=1)
    return values.new_zeros(len(runs)).index_add(0, index, values), index, counts


def quantities(tokens: Tokens, ratio: Tensor, clipped: Tensor | None = None) -> dict[str, Tensor]:
    """Return the metrics of every policy loss, float [N] each, without gradient.

    `actor/approxkl`: k3 of the old policy against the new, r - 1 - log r; `actor/ratio`: the loss's ratio;
    `actor/clipfrac`: 1 where a bound took the token's gradient, or cut its weight.

    ratio: float [N]; clipped: bool [N], or None.
    """
    with torch.no_grad():
        safe = log_ratios(tokens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return {
            "actor/approxkl": torch.expm1(safe) - safe,
            "actor/ratio": ratio.detach(),
            "actor/clipfrac": torch.zeros_like(safe) if clipped is None else clipped.to(safe.dtype),
        }
