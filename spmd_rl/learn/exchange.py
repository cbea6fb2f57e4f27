"""Samples on their way from the ranks that generated them to those that train them: one all-to-all, once a step.

    batches = deal(collected, plan, num_updates, world)  # [all]

Who gets which sample stands in the plan, and so does every size; only the columns of the tokens travel. The sample
itself stays where it was made, for the sample log. No rank ever holds more than its two shares.
"""

import numpy as np
import torch
from torch import Tensor

from spmd_rl.batch import Batch, lay_out, pack, runs
from spmd_rl.dist import World
from spmd_rl.learn.prepare import Plan
from spmd_rl.rollout import Collected

TOKEN = np.dtype([("token_ids", "<i4"), ("rollout_logprobs", "<f4"), ("versions", "<i4"), ("loss_mask", "?")])
"""What travels of each token, and as what: 13 bytes."""


def deal(collected: Collected, plan: Plan, num_updates: int, world: World) -> list[Batch]:
    """[all] The samples that this rank trains, one packed batch per optimizer step; any of them may be empty."""
    samples = {sample.key: sample for group in collected.groups for sample in group.samples}
    leaving = _rows(plan.holders == world.rank, plan.trainers)
    coming = _rows(plan.trainers == world.rank, plan.holders)
    batch = pack(samples[ticket, answer] for ticket, answer in plan.keys[leaving].tolist())
    assert torch.equal(batch.starts.diff(), plan.lengths[leaving]), "metadata of other samples"
    sent = _num_tokens(plan.trainers[leaving], plan.lengths[leaving], world.size)
    received = _num_tokens(plan.holders[coming], plan.lengths[coming], world.size)
    arrived = world.exchange("prepare: samples", encode(batch), sent, received)
    return [_batch(arrived, plan, coming, number) for number in range(num_updates)]


def _rows(chosen: Tensor, ranks: Tensor) -> Tensor:
    """The chosen rows of the plan, by (rank, row)."""
    rows = chosen.nonzero().flatten()
    return rows[ranks[rows].argsort(stable=True)]


def _num_tokens(ranks: Tensor, lengths: Tensor, size: int) -> list[int]:
    """Tokens of each rank."""
    return lengths.new_zeros(size).index_add(0, ranks, lengths).tolist()


def encode(batch: Batch) -> Tensor:
    """uint8 [T, 13]: a token a row."""
    tokens = np.empty(batch.num_tokens, TOKEN)
    for name in TOKEN.names:
        tokens[name] = getattr(batch, name).numpy()
    return torch.from_numpy(tokens.view(np.uint8).reshape(-1, TOKEN.itemsize))


def decode(rows: Tensor) -> dict[str, Tensor]:
    """The columns [T] again, in a batch's dtypes."""
    tokens = rows.numpy().reshape(-1).view(TOKEN)
    dtypes = {name: np.int64 if TOKEN[name] == np.int32 else TOKEN[name] for name in TOKEN.names}
    return {name: torch.from_numpy(tokens[name].astype(dtype)) for name, dtype in dtypes.items()}


def _batch(arrived: Tensor, plan: Plan, coming: Tensor, number: int) -> Batch:
    """One mini-batch of the tokens of the rows that have come, in the plan's order, with the plan's numbers."""
    starts = plan.lengths[coming].cumsum(0) - plan.lengths[coming]
    order = coming.argsort()
    order = order[plan.minibatches[coming[order]] == number]
    rows = coming[order]
    lengths = plan.lengths[rows]
    tokens = arrived.index_select(0, runs(starts[order], lengths))
    batch = lay_out(plan.keys[rows], lengths, **decode(tokens))
    numbers = torch.stack((plan.advantages, plan.weights))[:, rows].float().repeat_interleave(lengths, dim=1)
    batch.advantages, batch.weights = numbers * batch.loss_mask
    return batch
