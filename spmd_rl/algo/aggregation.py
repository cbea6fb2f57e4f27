"""Loss aggregation as one weight per sample: the loss is the sum over tokens of weight * token loss.

The weights come from the lengths of the *global* batch, so the gradient is the same however the batch is cut into
ranks, micro-batches or packs.
"""

import torch
from torch import Tensor


def token_mean(lengths: Tensor) -> Tensor:
    """Every token counts the same.

        w_i = 1 / sum_j |j|

    Source: DAPO (arXiv 2503.14476, eq. 8).
    Use: the default; long answers weigh more, as they hold more decisions.

    lengths: int64 [n], sampled tokens of each sample of the global batch. Returns float64 [n], the weight of each token
    of the sample.
    """
    return torch.full_like(lengths, 1, dtype=torch.float64) / lengths.sum().clamp(min=1)


def seq_mean_token_mean(lengths: Tensor) -> Tensor:
    """Every sample counts the same.

        w_i = 1 / (n |i|)

    Source: DeepSeekMath, GRPO (arXiv 2402.03300, eq. 3).
    Use: GRPO as published, and losses whose unit is the sample: `gspo`, `gmpo`, `sapo`. A long wrong answer is
    punished less per token than a short one.

    Shapes as in `token_mean`.
    """
    return 1.0 / (lengths.clamp(min=1).double() * max(1, lengths.numel()))


def seq_mean_token_sum(lengths: Tensor) -> Tensor:
    """Token losses are summed within a sample and averaged over samples.

        w_i = 1 / n

    Source: the policy gradient of whole samples (Williams 1992); `topr` and `kimi` are stated so.
    Use: the sum is the estimator; its size grows with the lengths, so the learning rate must suit them.

    Shapes as in `token_mean`.
    """
    return torch.full_like(lengths, 1, dtype=torch.float64) / max(1, lengths.numel())


def seq_mean_token_sum_norm(lengths: Tensor, *, loss_agg_length: int) -> Tensor:
    """Token losses are summed within a sample, over a constant: no length bias, and a size that lengths do not change.

        w_i = 1 / (n loss_agg_length)

    The constant is configured, never the width of a padded batch, which would make the loss depend on the batching.

    Source: Dr.GRPO, Understanding R1-Zero-Like Training (arXiv 2503.20783, section 3.2 and its listing 1).
    Keys: `loss_agg_length`: tokens, >= 1; the authors take the largest answer length (`rollout.max_new_tokens`).
    Use: Dr.GRPO.

    Shapes as in `token_mean`.
    """
    return seq_mean_token_sum(lengths) / loss_agg_length
