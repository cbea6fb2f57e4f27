"""The plan of a step: every cross-sample number, computed over the global batch.

An answer, or trajectory, has one sample or several segments; counts and means are over answers, never over segments.

All ranks hold the metadata of all samples (`table.ANSWER`), so each computes the same advantages, token weights and
distribution of the samples over the data shards, in (ticket, answer) order. Nothing here meets other ranks;
`redistribute.py` carries the plan out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.algo import AGGREGATIONS
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import as_tensor
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import DataShard
from spmd_rl.learn.balance import assign, divide
from spmd_rl.learn.binding import bind
from spmd_rl.learn.credit import Credit, credit, mask, whole_samples
from spmd_rl.learn.scores import Key, Metadata, Samples, keys
from spmd_rl.learn.transfer import Route


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank computes alike from the metadata of a step. One row per sample that trains, in order; n rows."""

    step: int
    keys: np.ndarray
    """int64 [n, 2]: (ticket, answer)"""
    units: np.ndarray
    """int64 [n]: see `Batch.units`"""
    lengths: np.ndarray
    """int64 [n]: tokens of the sample, prompt included"""
    num_prompt_tokens: np.ndarray
    """int64 [n]: tokens before the first sampled one"""
    num_sampled: np.ndarray
    """int64 [n]: tokens that the policy sampled"""
    trajectories: np.ndarray
    """int64 [n]: equal numbers mark the segments of an answer"""
    src_rank: np.ndarray
    """int64 [n]: rank that generated the sample"""
    data_rank: np.ndarray
    """int64 [n]: data shard of the policy that trains it"""
    num_runs: np.ndarray
    """int64 [n]: runs of sampled tokens that are credited as one: the whole sample, or each turn of an agent"""
    turns: np.ndarray
    """int64 [r]: of these runs, sample by sample; equal numbers mark one turn, or one answer"""
    run_lengths: np.ndarray
    """int64 [r]: sampled tokens"""
    advantages: np.ndarray
    """float64 [r]: advantage of each of its tokens; before a token-level estimator, the reward of its turn"""
    weights: np.ndarray
    """float64 [n]: weight of each token of the sample in its mini-batch"""
    minibatches: np.ndarray
    """int64 [n]: number of the optimizer step that uses the sample; ascending"""
    masked: tuple[tuple[Key, str], ...]
    """samples of answers that have a score and do not train, each with the reason"""
    left_out: float
    """the share of the scored answers that do not train"""
    stale: bool
    """some sample holds tokens of an older policy version"""
    balance: float
    """work of the slowest rank over the mean, summed over the optimizer steps; 1 is perfect"""
    mean_reward: float
    """of the shaped scores; 0 without any"""

    @property
    def num_answers(self) -> int:
        """How many answers train."""
        return len(np.unique(self.trajectories))

    def metrics(self) -> dict[str, float]:
        """How the work is spread, and how much of what was collected is of use."""
        return {"actor/balance": self.balance, "actor/left_out": self.left_out}

    def columns(self) -> tuple[Any, ...]:
        """Everything: what ranks compare."""
        return tuple([getattr(self, name) for name in self.__slots__])

    def route(self, data: DataShard) -> Route:
        """From the ranks that generated the samples to the policy's data shards."""
        return Route(self.keys, self.units, self.lengths, self.src_rank, self.data_rank, data)

    def elsewhere(self, data: DataShard, hidden_size: int) -> "Plan":
        """The same plan for a role with other data shards: only `data_rank` differs. hidden_size: the role's."""
        bounds = self.minibatches.searchsorted(np.arange(self.minibatches.max(initial=0) + 2)).tolist()
        samples = np.stack((self.keys[:, 0], self.units, self.num_prompt_tokens, self.lengths), axis=1)
        return replace(self, data_rank=assign(samples, bounds, data.size, hidden_size)[0])


def plan(
    collected: Samples,
    settings: AlgorithmConfig,
    running: Moments,
    *,
    num_updates: int,
    num_shards: int,
    hidden_size: int,
    max_tokens: int,
    greedy_answer: int | None = None,
    penalties: Mapping[Key, float] | None = None,
) -> tuple[Plan, Moments]:
    """Advantages, weights and the distribution over the data shards; and the moments of the run's scores.

    running: those moments before this step. num_updates: optimizer steps, between which the tickets are divided in
    order. num_shards: data shards, over which the samples of each of them are spread. hidden_size: the policy's, for
    the work that a sample makes. max_tokens: of an answer. greedy_answer: the number of the answer that is a baseline,
    if there is one. penalties: added to the scores.
    """
    data = Metadata.of(collected, greedy_answer)
    extra = None if penalties is None else as_tensor([penalties[key] for key in keys(data.answers)], np.float64)
    found = credit(data, settings, running, max_tokens, extra)
    aggregate = bind(AGGREGATIONS[settings.loss_agg], settings)
    shares = num_updates, num_shards, hidden_size
    return _deal(collected.step, data, found, *mask(data, settings), aggregate, shares), found.running


def plan_supervised(collected: Samples, num_updates: int, num_shards: int, hidden_size: int) -> Plan:
    """The plan by which all sampled tokens of an update weigh the same, whatever their scores. Parameters: `plan`."""
    data = Metadata.of(collected)
    ones = torch.ones(len(data.answers), dtype=torch.float64)
    found = Credit(ones.numpy(), whole_samples(data), ones, Moments())
    shares = num_updates, num_shards, hidden_size
    return _deal(collected.step, data, found, {}, ones.clone(), AGGREGATIONS["token-mean"], shares)


def _deal(
    step: int,
    data: Metadata,
    found: Credit,
    masked: Mapping[int, str],
    weights: Tensor,
    aggregate: Callable[[Tensor], Tensor],
    shares: tuple[int, int, int],
) -> Plan:
    """Spread the answers that are not `masked` over `shares`, which are `num_updates` and so on.

    weights: float64, of each of them, beside its share of the mean.
    """
    num_updates, num_shards, hidden_size = shares
    trains = np.ones(len(data.answers), np.bool_)
    trains[list(masked)] = False
    minibatches = divide(data.answers["ticket"][trains], num_updates)
    bounds_in = partial(np.searchsorted, v=np.arange(num_updates + 1))
    for begin, end in pairwise(bounds_in(minibatches).tolist()):
        weights[begin:end] *= aggregate(data.lengths[trains][begin:end])
    kept = trains[data.owners]
    samples, owners = data.samples[kept], (trains.cumsum() - 1)[data.owners[kept]]
    runs, kept_runs = found.runs, kept.repeat(found.runs.counts)
    rows = np.stack([samples[name] for name in ("ticket", "unit", "num_prompt_tokens", "num_tokens")], axis=1)
    data_rank, imbalance = assign(rows, bounds_in(minibatches[owners]).tolist(), num_shards, hidden_size)
    left_out = data.num_excluded + len(masked)
    return Plan(
        step=step,
        keys=np.stack((samples["ticket"], samples["answer"]), axis=1),
        units=samples["unit"].astype(np.int64),
        lengths=samples["num_tokens"].astype(np.int64),
        num_prompt_tokens=samples["num_prompt_tokens"].astype(np.int64),
        num_sampled=samples["num_answer_tokens"].astype(np.int64),
        trajectories=owners,
        src_rank=samples["rank"].astype(np.int64),
        data_rank=data_rank,
        num_runs=runs.counts[kept],
        turns=runs.turns[kept_runs],
        run_lengths=runs.lengths[kept_runs],
        advantages=found.advantages[runs.turns[kept_runs]],
        weights=weights.numpy()[owners],
        minibatches=minibatches[owners],
        masked=data.excluded + _reasons(data, masked),
        left_out=left_out / max(1, data.num_excluded + len(trains)),
        stale=bool((samples["lag"] > 0).any()),
        balance=imbalance,
        mean_reward=float(found.scores.mean()) if len(found.scores) else 0.0,
    )


def _reasons(data: Metadata, masked: Mapping[int, str]) -> tuple[tuple[Key, str], ...]:
    """Why the samples of these answers do not train."""
    rows = np.flatnonzero(np.isin(data.owners, list(masked))) if masked else np.empty(0, np.int64)
    reasons = [masked[owner] for owner in data.owners[rows].tolist()]
    return tuple(zip(keys(data.samples[rows]), reasons, strict=True))
