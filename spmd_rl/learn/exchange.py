"""Samples on their way from the ranks that generated them to those that train them: one all-to-all, once a step.

    batches = deal(collected, plan, num_updates, world)  # [all]

Who gets which sample stands in the plan, and so does every size; only the columns of the tokens travel. The sample
itself stays where it was made, for the sample log. No rank ever holds more than its two shares.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spmd_rl.batch import Batch, lay_out, pack
from spmd_rl.dist import World
from spmd_rl.learn.prepare import Plan
from spmd_rl.rollout import Collected

COLUMNS = {
    "token_ids": torch.int32,
    "rollout_logprobs": torch.float32,
    "versions": torch.int32,
    "loss_mask": torch.bool,
}
"""What travels of each token, and as what: 13 bytes."""


def deal(collected: Collected, plan: Plan, num_updates: int, world: World) -> list[Batch]:
    """[all] The samples that this rank trains, one packed batch per optimizer step; any of them may be empty."""
    samples = {sample.key: sample for group in collected.groups for sample in group.samples}
    both = list(zip(plan.holders, plan.trainers, strict=True))
    leaving = sorted((to, row) for row, (at, to) in enumerate(both) if at == world.rank)
    coming = sorted((at, row) for row, (at, to) in enumerate(both) if to == world.rank)
    batch = pack(samples[plan.keys[row]] for _, row in leaving)
    assert batch.starts.diff().tolist() == [plan.lengths[row] for _, row in leaving], "metadata of other samples"
    arrived = world.exchange(
        "prepare: samples", encode(batch), _num_tokens(leaving, plan, world.size), _num_tokens(coming, plan, world.size)
    )
    return _batches(decode(arrived), plan, [row for _, row in coming], num_updates)


def _num_tokens(rows: Sequence[tuple[int, int]], plan: Plan, size: int) -> list[int]:
    """Tokens of these (rank, row) by rank."""
    counts = [0] * size
    for rank, row in rows:
        counts[rank] += plan.lengths[row]
    return counts


def encode(batch: Batch) -> Tensor:
    """uint8 [T, 13]: the columns side by side, a token a row."""
    columns = (getattr(batch, name)[:, None].to(dtype) for name, dtype in COLUMNS.items())
    return torch.cat([column.view(torch.uint8) for column in columns], dim=1)


def decode(rows: Tensor) -> dict[str, Tensor]:
    """The columns [T] again, in a batch's dtypes."""
    parts = rows.split([dtype.itemsize for dtype in COLUMNS.values()], dim=1)
    columns = {}
    for (name, dtype), part in zip(COLUMNS.items(), parts, strict=True):
        column = part.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(1)
        columns[name] = column.long() if dtype == torch.int32 else column
    return columns


def _batches(columns: Mapping[str, Tensor], plan: Plan, rows: Sequence[int], num_updates: int) -> list[Batch]:
    """What has arrived, cut into mini-batches in the plan's order, with the plan's numbers filled in."""
    everything = lay_out([plan.keys[row] for row in rows], [plan.lengths[row] for row in rows], **columns)
    places = sorted(range(len(rows)), key=lambda place: rows[place])
    batches = []
    for number in range(num_updates):
        mine = [place for place in places if plan.minibatches[rows[place]] == number]
        batch = everything.select(mine)
        tokens = batch.starts.diff(), batch.loss_mask
        batch.advantages = _spread([plan.advantages[rows[place]] for place in mine], *tokens)
        batch.weights = _spread([plan.weights[rows[place]] for place in mine], *tokens)
        batches.append(batch)
    return batches


def _spread(values: Sequence[float], lengths: Tensor, mask: Tensor) -> Tensor:
    """Each sample's value at its sampled tokens: float32 [T]."""
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths) * mask
