"""Statistics over all sampled tokens of a step, wherever they lie."""

from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from spmd_rl.algo.moments import Moments, merged
from spmd_rl.batch import Batch
from spmd_rl.distributed import DataShard


def moments_of(batches: Sequence[Batch], columns: Sequence[Tensor], data: DataShard) -> Moments:
    """[all] Of a column's values at the sampled tokens of all data shards and mini-batches; equal on all ranks.

    columns: float32 [T] of each batch.
    """
    mine = Moments.of(torch.cat([c[batch.loss_mask] for batch, c in zip(batches, columns, strict=True)]))
    records = data.gather("prepare: moments", astuple(mine))  # [all]
    return merged(Moments(*record) for record in records)
