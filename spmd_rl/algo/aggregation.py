"""Loss aggregation: one weight per sample; the loss is the sum over tokens of weight * token loss.

Weights come from the lengths of the *global* batch, so the gradient does not depend on ranks, micro-batches or packs.
"""

import torch
from torch import Tensor


def token_mean(lengths: Tensor) -> Tensor:
    """Weight every token of the global batch equally.

        w_i = 1 / sum_j |j|

    Source: DAPO (arXiv 2503.14476, eq. 8).
    Use: the default; long answers weigh more.

    lengths: int64 [n], sampled tokens of each sample of the global batch. Returns the weights, float64 [n].
    """
    return torch.full_like(lengths, 1, dtype=torch.float64) / lengths.sum().clamp(min=1)


def seq_mean_token_mean(lengths: Tensor) -> Tensor:
    """Average token losses within a sample, then over samples: every sample counts equally.

        w_i = 1 / (n |i|)

    Source: GRPO (arXiv 2402.03300, eq. 3).
    Use: GRPO as published, `gspo`, `gmpo`, `sapo`. A long wrong answer is punished less per token than a short one.

    Shapes as in `token_mean`.
    """
    return 1.0 / (lengths.clamp(min=1).double() * max(1, lengths.numel()))


def seq_mean_token_sum(lengths: Tensor) -> Tensor:
    """Sum token losses within a sample and average over samples.

        w_i = 1 / n

    Source: Williams 1992; `topr` and `kimi` are stated so.
    Use: its size grows with the lengths, which the learning rate must suit.

    Shapes as in `token_mean`.
    """
    return torch.full_like(lengths, 1, dtype=torch.float64) / max(1, lengths.numel())


def seq_mean_token_sum_norm(lengths: Tensor, *, loss_agg_length: int) -> Tensor:
    """Sum token losses within a sample, divide by a constant and average over samples: no length bias.

        w_i = 1 / (n loss_agg_length)

    Source: Dr.GRPO (arXiv 2503.20783, section 3.2 and listing 1).
    Keys: `loss_agg_length`: tokens, >= 1; the authors use `rollout.max_new_tokens`.
    Use: Dr.GRPO.

    Shapes as in `token_mean`.
    """
    # A setting, since the width of a padded batch would make the loss depend on the batching.
    return seq_mean_token_sum(lengths) / loss_agg_length
