"""Numbers per answer outside the table of a step: parts of verdicts (`algorithm.reward_weights`) and penalties."""

from collections.abc import Iterable, Sequence

import torch

from spmd_rl.algo.shaping import repetition_penalty
from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import World
from spmd_rl.learn.advantages import Key
from spmd_rl.learn.custom import bind
from spmd_rl.rollout.table import trajectories_of
from spmd_rl.types import Group, Prompt, Sample, Verdict, concat


def verdict_terms(
    groups: Iterable[Group], names: Sequence[str], world: World
) -> dict[tuple[int, int], tuple[float, ...]]:
    """[all] Return the parts `names` of each scored answer of all ranks, by (ticket, answer) of its last sample.
    groups: of this rank. UserError, on all ranks, if a verdict lacks one."""
    rows, problems = [], []
    for group in groups:
        for samples in trajectories_of(group.samples):
            verdict = samples[-1].verdict
            if verdict.scored:
                problems += [_missing(name, group.prompt, verdict) for name in names if name not in verdict.parts]
                rows.append([*samples[-1].key, *(verdict.parts.get(name, 0.0) for name in names)])
    with world.phase("coordination"):
        records = world.gather("prepare: terms of verdicts", [problems[:1], rows])  # [all]
    for problem in (problem for theirs, _ in records for problem in theirs):
        raise UserError(problem)
    return {(ticket, answer): tuple(values) for _, theirs in records for ticket, answer, *values in theirs}


def repetition_penalties(
    trajectories: Iterable[Sequence[Sample]], settings: AlgorithmConfig, world: World
) -> dict[Key, float]:
    """[all] Return the penalty of each answer for repetition over all its turns, by the key of its last sample.
    trajectories: of this rank, with their samples."""
    penalty = bind(repetition_penalty, settings)
    mine = []
    for samples in trajectories:
        turns = [turn.token_ids for sample in samples for turn in sample.turns]
        mine.append([*samples[-1].key, penalty(torch.tensor(concat(turns, "i"), dtype=torch.int64))])
    with world.phase("coordination"):
        records = world.gather("prepare: repetition", mine)
    return {(ticket, answer): value for record in records for ticket, answer, value in record}


def _missing(name: str, prompt: Prompt, verdict: Verdict) -> str:
    has = ", ".join(sorted(verdict.parts)) or "none"
    return f"algorithm.reward_weights.{name}: a verdict of reward.{prompt.domain} has no such part; it has {has}"
