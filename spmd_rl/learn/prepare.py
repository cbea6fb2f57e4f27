"""The plan of a step: all numbers that depend on several samples, and each sample's data shard.

All ranks compute the same plan from the metadata of all samples (`table.ANSWER`); `transfer.py` carries it out. Counts
and means are over answers, not segments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.data.seeds import counter_seed
from spmd_rl.distributed import DataShard
from spmd_rl.learn.advantages import Key, StepTable, keys
from spmd_rl.learn.balance import assign, divide
from spmd_rl.types import Group, Sample


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Numbers of the n samples that train, in (ticket, answer) order; equal on all ranks."""

    step: int
    keys: np.ndarray
    """int64 [n, 2]: (ticket, number of the sample)"""
    units: np.ndarray
    """int64 [n]: see `Batch.units`"""
    lengths: np.ndarray
    """int64 [n]: all tokens, prompt included"""
    num_prompt_tokens: np.ndarray
    """int64 [n]: tokens before the first sampled one"""
    num_sampled: np.ndarray
    """int64 [n]: sampled tokens"""
    trajectories: np.ndarray
    """int64 [n]: equal numbers mark an answer's segments"""
    src_rank: np.ndarray
    """int64 [n]: rank that holds the sample"""
    data_rank: np.ndarray
    """int64 [n]: data shard of the policy"""
    num_spans: np.ndarray
    """int64 [n]: spans in the sample: 1, or one per turn of an agent; a span has one advantage"""
    turns: np.ndarray
    """int64 [r]: turn or answer of each span; spans with equal numbers share an advantage"""
    span_lengths: np.ndarray
    """int64 [r]: sampled tokens of each span"""
    advantages: np.ndarray
    """float64 [r]: mean advantage of each span's tokens; with a token-level estimator, first its turn's reward"""
    weights: np.ndarray
    """float64 [n]: weight of each token in its mini-batch"""
    right: np.ndarray
    """float64 [n]: see `Tokens.right`; 0 if unused"""
    minibatches: np.ndarray
    """int64 [n], ascending"""
    masked: tuple[tuple[Key, str], ...]
    """samples of scored answers that do not train, with the reason"""
    left_out: float
    """share of scored answers that do not train"""
    stale: bool
    """True if a sample has tokens of an older policy version"""
    balance: float
    """work of the slowest rank over the mean, summed over optimizer steps"""
    mean_reward: float
    """mean shaped score; 0 without any"""

    @property
    def num_answers(self) -> int:
        """Number of answers that train."""
        return len(np.unique(self.trajectories))

    def metrics(self) -> dict[str, float]:
        """Return the balance of work, and the share of answers left out."""
        return {"actor/balance": self.balance, "actor/left_out": self.left_out}

    def samples_of(self, groups: Iterable[Group], rank: int) -> list[Sample]:
        """Return this rank's samples that train, in order."""
        samples = {sample.key: sample for group in groups for sample in group.samples}
        keys = map(tuple, self.keys[self.src_rank == rank].tolist())
        # A sample is missing only if ranks disagree on the plan, which `transfer` then reports on all of them.
        return [samples[key] for key in keys if key in samples]

    def visits(self, num_epochs: int, seed: int) -> list[int]:
        """Return the mini-batch of each optimizer step: non-empty ones in order, then each further epoch in random
        order.
        """
        used = np.unique(self.minibatches).tolist()
        orders = [
            sorted(used, key=lambda number, e=epoch: counter_seed("epoch", seed, self.step, e, number))
            for epoch in range(1, num_epochs)
        ]
        return [number for order in (used, *orders) for number in order]

    def columns(self) -> tuple[Any, ...]:
        """Return all fields, for the comparison between ranks."""
        return tuple([getattr(self, name) for name in self.__slots__])

    def with_advantages(self, batches: Sequence[Batch], data: DataShard) -> "UpdatePlan":
        """[all] Return the plan with each span's mean advantage in this rank's mini-batches. data: this rank's data
        shard.
        """
        here = (self.data_rank == data.rank).repeat(self.num_spans)
        lengths = self.span_lengths[here]
        spans = np.arange(len(lengths)).repeat(lengths)
        tokens = [batch.advantages[batch.sampled.index].double().numpy() for batch in batches]
        sums = np.bincount(spans, np.concatenate(tokens), len(lengths))
        shards = data.gather("prepare: advantages", (sums / lengths).tolist())  # [all]
        advantages = np.empty_like(self.advantages)
        for shard, means in enumerate(shards):
            advantages[(self.data_rank == shard).repeat(self.num_spans)] = means
        return replace(self, advantages=advantages)

    def elsewhere(self, data: DataShard, hidden_size: int) -> "UpdatePlan":
        """Return the plan for a role with other data shards: only `data_rank` differs."""
        bounds = self.minibatches.searchsorted(np.arange(self.minibatches.max(initial=0) + 2)).tolist()
        samples = np.stack((self.keys[:, 0], self.units, self.num_prompt_tokens, self.lengths), axis=1)
        return replace(self, data_rank=assign(samples, bounds, data.size, hidden_size)[0])


class Shares(NamedTuple):
    """Numbers that determine how a step is divided."""

    num_updates: int
    num_shards: int
    hidden_size: int
    """of the policy; sets the work of a sample"""


def plan(step: int, table: StepTable, shares: Shares, aggregate: Callable[[Tensor], Tensor]) -> UpdatePlan:
    """Return the plan of the answers that train.

    aggregate: weighs the answers of an optimizer step by their lengths; one of `algo.AGGREGATIONS`.
    """
    weights = table.weights.clone()
    trains = np.ones(len(table.answers), np.bool_)
    trains[list(table.masked)] = False
    right = table.right[torch.from_numpy(trains)].double()
    minibatches = divide(table.answers["ticket"][trains], shares.num_updates)
    bounds_in = partial(np.searchsorted, v=np.arange(shares.num_updates + 1))
    for begin, end in pairwise(bounds_in(minibatches).tolist()):
        weights[begin:end] *= aggregate(table.lengths[trains][begin:end])
        # 1 / tokens of right answers; divided below by the weight that the loss is multiplied with.
        right[begin:end] /= (right[begin:end] @ table.lengths[trains][begin:end].double()).clamp(min=1)
    kept = trains[table.owners]
    samples, owners = table.samples[kept], (trains.cumsum() - 1)[table.owners[kept]]
    spans, kept_spans = table.spans, kept.repeat(table.spans.counts)
    rows = np.stack([samples[name] for name in ("ticket", "unit", "num_prompt_tokens", "num_tokens")], axis=1)
    bounds = bounds_in(minibatches[owners]).tolist()
    data_rank, imbalance = assign(rows, bounds, shares.num_shards, shares.hidden_size)
    left_out = table.num_excluded + len(table.masked)
    return UpdatePlan(
        step=step,
        keys=np.stack((samples["ticket"], samples["answer"]), axis=1),
        units=samples["unit"].astype(np.int64),
        lengths=samples["num_tokens"].astype(np.int64),
        num_prompt_tokens=samples["num_prompt_tokens"].astype(np.int64),
        num_sampled=samples["num_answer_tokens"].astype(np.int64),
        trajectories=owners,
        src_rank=samples["rank"].astype(np.int64),
        data_rank=data_rank,
        num_spans=spans.counts[kept],
        turns=spans.turns[kept_spans],
        span_lengths=spans.lengths[kept_spans],
        advantages=table.advantages[spans.turns[kept_spans]],
        weights=weights.numpy()[owners],
        right=(right / weights).numpy()[owners],
        minibatches=minibatches[owners],
        masked=table.excluded + _reasons(table, table.masked),
        left_out=left_out / max(1, table.num_excluded + len(trains)),
        stale=bool((samples["lag"] > 0).any()),
        balance=imbalance,
        mean_reward=_mean(table.shaped),
    )


def with_scores(plan: UpdatePlan, table: StepTable) -> UpdatePlan:
    """Return the plan with the advantages and mean reward of another table of the same answers."""
    return replace(plan, advantages=table.advantages[plan.turns], mean_reward=_mean(table.shaped))


def _mean(scores: Tensor) -> float:
    return float(scores.mean()) if len(scores) else 0.0


def _reasons(table: StepTable, masked: Mapping[int, str]) -> tuple[tuple[Key, str], ...]:
    rows = np.flatnonzero(np.isin(table.owners, list(masked))) if masked else np.empty(0, np.int64)
    reasons = [masked[owner] for owner in table.owners[rows].tolist()]
    return tuple(zip(keys(table.samples[rows]), reasons, strict=True))
