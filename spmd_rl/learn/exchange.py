"""Samples on their way from the ranks that generated them to those that train them: one all-to-all, once a step.

    batches = deal(collected, plan, num_updates, world)  # [all]

Who gets which sample stands in the plan, and so does every size; only the columns of the tokens travel. The sample
itself stays where it was made, for the sample log. No rank ever holds more than its two shares.
"""

from itertools import pairwise

import numpy as np
import torch

from spmd_rl.batch import TOKEN, Batch, flatten, lay_out, stretches
from spmd_rl.distributed import World
from spmd_rl.learn.prepare import Plan
from spmd_rl.rollout import Collected


def deal(collected: Collected, plan: Plan, num_updates: int, world: World) -> list[Batch]:
    """[all] The samples that this rank trains, one packed batch per optimizer step; any of them may be empty.

    RunFailed, on all ranks alike, unless they have the same plan.
    """
    holders, trainers, lengths = plan.holders, plan.trainers, plan.lengths
    num_tokens = np.zeros((world.size, world.size), np.int64)
    np.add.at(num_tokens, (holders, trainers), lengths)
    leaving = np.flatnonzero(holders == world.rank)
    leaving = leaving[trainers[leaving].argsort(kind="stable")]
    samples = {sample.key: sample for group in collected.groups for sample in group.samples}
    keys = map(tuple, plan.keys[leaving].tolist())
    tokens, held = flatten([samples[key] for key in keys if key in samples])  # all are, if the ranks agree
    with world.phase("coordination"):
        arrived = world.exchange("prepare: samples", to_rows(tokens), num_tokens, plan.columns())  # [all]
    assert np.array_equal(held, lengths[leaving]), "metadata of other samples"
    coming = np.flatnonzero(trainers == world.rank)
    return _batches(_in_order(to_tokens(arrived), holders[coming], lengths[coming]), plan, coming, num_updates)


def to_rows(tokens: np.ndarray) -> torch.Tensor:
    """`TOKEN` [T] as bytes, uint8 [T, 13]; the same memory."""
    return torch.from_numpy(tokens.view(np.uint8).reshape(-1, TOKEN.itemsize))


def to_tokens(rows: torch.Tensor) -> np.ndarray:
    """`TOKEN` [T] again."""
    return rows.numpy().reshape(-1).view(TOKEN)


def _in_order(tokens: np.ndarray, holders: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The tokens of samples in the plan's order; they came by holder, and only then in that order."""
    came = holders.argsort(kind="stable")
    if (came[1:] > came[:-1]).all():
        return tokens
    begins = np.empty_like(lengths)
    begins[came] = lengths[came].cumsum() - lengths[came]
    return stretches(tokens, begins, lengths)


def _batches(tokens: np.ndarray, plan: Plan, coming: np.ndarray, num_updates: int) -> list[Batch]:
    """The mini-batches of the rows that have come, with the plan's numbers; each is a stretch of them."""
    batches, done = [], 0
    for begin, end in pairwise(plan.minibatches[coming].searchsorted(np.arange(num_updates + 1)).tolist()):
        rows = coming[begin:end]
        lengths = plan.lengths[rows]
        mine = tokens[done : done + lengths.sum()]
        done += len(mine)
        batches.append(lay_out(plan.keys[rows], lengths, mine, plan.advantages[rows], plan.weights[rows]))
    return batches
