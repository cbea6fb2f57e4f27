"""The tokens of a batch, trajectory by trajectory, where one has several samples (segments).

What is computed over whole trajectories (returns, ratios of sequences) takes tokens in this order; they lie together,
as a data shard and a micro-batch hold all segments of a trajectory.
"""

import torch
from torch import Tensor

from spmd_rl.batch import Batch


def by_trajectory(batch: Batch) -> tuple[Tensor | None, Tensor]:
    """The order of the N sampled tokens in which those of a trajectory are neighbours, its segments in order, and the
    number of each one's trajectory in that order: int64 [N], 0, 1, ... without gaps. No order: they are already.
    """
    if batch.trajectories is None:
        return None, batch.sampled.samples
    numbers = batch.trajectories.repeat_interleave(batch.starts.diff(), output_size=batch.num_tokens)
    numbers = numbers[batch.sampled.index]
    order = numbers.argsort(stable=True)
    return order, torch.unique_consecutive(numbers[order], return_inverse=True)[1]
