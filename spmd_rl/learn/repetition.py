"""The one penalty that needs an answer's tokens: the rank that generated it computes the penalty for all ranks."""

import torch

from spmd_rl.algo.shaping import repetition_penalty
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import World
from spmd_rl.learn.binding import bind
from spmd_rl.learn.scores import Key, Samples
from spmd_rl.rollout.table import trajectories_of
from spmd_rl.types import concat


def penalties(collected: Samples, settings: AlgorithmConfig, world: World) -> dict[Key, float]:
    """[all] What each answer of the groups that train loses for repeating itself, counted over all its turns.

    An answer of several samples goes by the key of its last one.
    """
    penalty = bind(repetition_penalty, settings)
    mine = []
    for samples in (samples for group in collected.groups for samples in trajectories_of(group.samples)):
        turns = [turn.token_ids for sample in samples for turn in sample.turns]
        mine.append([*samples[-1].key, penalty(torch.tensor(concat(turns, "i"), dtype=torch.int64))])
    with world.phase("coordination"):
        records = world.gather("prepare: repetition", mine)
    return {(ticket, answer): value for record in records for ticket, answer, value in record}
