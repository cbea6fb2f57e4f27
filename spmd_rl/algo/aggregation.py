"""Loss aggregation as one weight per sample: the loss is the sum over tokens of weight * token loss.

The weights come from the lengths of the *global* batch, so the gradient is the same however the batch is cut into
ranks, micro-batches or packs.
"""

import torch
from torch import Tensor


def token_mean(lengths: Tensor) -> Tensor:
    """Every token counts the same: 1 / total tokens (DAPO, arXiv 2503.14476, eq. 8).

    lengths: int64 [n], answer tokens of each sample. Returns float64 [n], the weight of each token of the sample.
    """
    return torch.full_like(lengths, 1, dtype=torch.float64) / lengths.sum().clamp(min=1)


def seq_mean_token_mean(lengths: Tensor) -> Tensor:
    """Every sample counts the same: 1 / (n * length) (GRPO, arXiv 2402.03300, eq. 3). Shapes as in `token_mean`."""
    return 1.0 / (lengths.clamp(min=1).double() * max(1, lengths.numel()))


def seq_mean_token_sum(lengths: Tensor) -> Tensor:
    """Token losses summed within a sample, averaged over samples: 1 / n. Shapes as in `token_mean`."""
    return torch.full_like(lengths, 1, dtype=torch.float64) / max(1, lengths.numel())
