"""Importance weights that correct the mismatch between the engine that sampled and the trainer.

Engine and trainer logprobs differ for the same weights (kernels, precision, cache), so samples are slightly off-policy
even in the first update. The caller multiplies each token's loss by its weight.
"""

import torch
from torch import Tensor

from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.policy.ratios import run_means, run_sums, safe_exp

CORRECTION_LEVELS = {
    "token": lambda tokens, difference: difference,
    "segment": lambda tokens, difference: run_means(difference, tokens.segments),
    "sequence": lambda tokens, difference: run_sums(difference, tokens.samples),
    "geometric": lambda tokens, difference: run_means(difference, tokens.samples),
}
"""Scope of one weight: `segment` and `geometric` are geometric means, `sequence` is the product over a sample."""


def raw_weights(tokens: Tokens, level: str) -> Tensor:
    """Return pi_old / pi_engine over each token, segment or sample, float [N], unbounded; `off`: by token."""
    with torch.no_grad():
        difference = tokens.old_logprobs - tokens.rollout_logprobs
        return safe_exp(CORRECTION_LEVELS["token" if level == "off" else level](tokens, difference))


def mismatch(tokens: Tokens, level: str) -> dict[str, Tensor]:
    """Return measures of the distance between engine and trainer, float [N] each; names end in their reduction.

    `train_infer/abs_diff`: |log pi_old - log pi_engine|; `train_infer/ratio`: the raw weight;
    `train_infer/ratio_square/mean` is for `effective_share`.
    """
    difference, ratio = (tokens.old_logprobs - tokens.rollout_logprobs).abs(), raw_weights(tokens, level)
    return {
        "train_infer/abs_diff/mean": difference,
        "train_infer/abs_diff/max": difference,
        "train_infer/ratio/mean": ratio,
        "train_infer/ratio/max": ratio,
        "train_infer/ratio/min": ratio,
        "train_infer/ratio_square/mean": ratio.square(),
    }


def effective_share(mean: float, mean_square: float) -> float:
    """Return the effective sample size of importance weights over their number (Kish)."""
    # Rounding alone can give more than 1.
    return min(1.0, mean * mean / mean_square) if mean_square else 0.0


def correction(
    tokens: Tokens, *, level: str, upper: float | None, mask_low: float | None, mask_high: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute weights of the trainer's old policy over the engine's, truncated, masked and without gradient.

        w_t = min(rho, upper) where mask_low <= rho <= mask_high, else 0;    log rho = sum or mean of
        log pi_old(t) - log pi_engine(t) over the token, segment or sample

    log rho is clamped to +-20. A bound of None does not apply.

    Source: truncation: TIS (Yao et al. 2025); masks: IcePop (arXiv 2510.18855) per token, When Speed Kills Stability
    (Liu et al. 2025) per sequence.
    Keys: `level`: `token`, `segment`, `sequence` or `geometric`; `upper`: bound of the weight, >= 1, such as 2;
    `mask_low`, `mask_high`: ratios outside are masked, such as 0.5 and 5.
    Use: engine and trainer differ in precision or kernels; `sequence` is unbiased and noisy on long answers, `token`
    biased and calm.

    Returns weights, float [N], and metrics per token.
    """
    with torch.no_grad():
        ratio = raw_weights(tokens, level)
        masked = torch.zeros_like(ratio, dtype=torch.bool)
        if mask_low is not None:
            masked |= ratio < mask_low
        if mask_high is not None:
            masked |= ratio > mask_high
        weights = (ratio if upper is None else ratio.clamp(max=upper)).masked_fill(masked, 0)
        return weights, {
            "train_infer/ratio": ratio,
            "train_infer/truncated": ((weights < ratio) & ~masked).to(ratio.dtype),
            "train_infer/masked": masked.to(ratio.dtype),
        }
