"""From the ranks that generated the samples to those that train them: one all-to-all, once a step.

    batches = redistribute(collected, plan, num_updates, policy.layout.data, world)  # [all]

The plan says who gets which sample. A sample itself stays on the rank that generated it, for the sample log.
"""

import numpy as np
import torch
from torch import Tensor

from spmd_rl.batch import Batch, pack
from spmd_rl.distributed import DataShard, World
from spmd_rl.learn.prepare import Plan
from spmd_rl.learn.scores import Samples
from spmd_rl.learn.transfer import transfer


def redistribute(
    collected: Samples,
    plan: Plan,
    num_updates: int,
    data: DataShard,
    world: World,
    truncated: bool = False,
    replayed: bool = False,
) -> list[Batch]:
    """[all] The samples of this rank's data shard, one packed batch per optimizer step; any of them may be empty.

    data: this rank's shard of the policy's. truncated, replayed: whether the batches have `survivors` and `experts`.
    RunFailed, on all ranks alike, unless they have the same plan.
    """
    samples = {sample.key: sample for group in collected.groups for sample in group.samples}
    keys = map(tuple, plan.keys[plan.src_rank == world.rank].tolist())
    own = [samples[key] for key in keys if key in samples]
    packed = pack(own, version=collected.step - 1, truncated=truncated, replayed=replayed)
    packed.advantages = packed.weights = None  # every rank has them, in the plan
    with world.phase("coordination"):
        batch = transfer("prepare: samples", packed, plan.route(data), world, plan.columns())  # [all]
    mine = plan.data_rank == data.rank
    runs = mine.repeat(plan.num_runs)
    batch.advantages = _at_sampled(plan.advantages[runs].astype(np.float32), plan.run_lengths[runs], batch)
    batch.weights = _at_sampled(plan.weights[mine].astype(np.float32), plan.num_sampled[mine], batch)
    if len(plan.turns) != plan.num_answers:  # on all ranks alike
        batch.turns = _at_sampled(plan.turns[runs], plan.run_lengths[runs], batch)
        batch.trajectories = torch.from_numpy(plan.trajectories[mine])
    if num_updates == 1:
        return [batch]
    numbers = plan.minibatches[mine]
    return [batch.select(np.flatnonzero(numbers == number)) for number in range(num_updates)]


def _at_sampled(values: np.ndarray, lengths: np.ndarray, batch: Batch) -> Tensor:
    """The value of each run of sampled tokens of these lengths, sample by sample, 0 elsewhere. [T]"""
    at_sampled = torch.from_numpy(values.repeat(lengths))
    return torch.zeros(batch.num_tokens, dtype=at_sampled.dtype).masked_scatter(batch.loss_mask, at_sampled)
