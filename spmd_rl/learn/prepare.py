"""The plan of a step: every cross-sample number, computed over the global batch.

All ranks hold the metadata of all samples (`outcomes.ANSWER`), so each computes the same advantages, token weights and
distribution of the samples over the data shards, in (ticket, answer) order. Nothing here meets other ranks;
`redistribute.py` carries the plan out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from spmd_rl.algo import AGGREGATIONS
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import as_tensor
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import DataShard
from spmd_rl.learn.balance import assign, divide
from spmd_rl.learn.binding import bind
from spmd_rl.learn.masking import mask
from spmd_rl.learn.own import answer_advantage
from spmd_rl.learn.scores import Key, Metadata, keys, shape
from spmd_rl.learn.transfer import Route
from spmd_rl.rollout import Collected


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
    src_rank: np.ndarray
    """int64 [n]: rank that generated the sample"""
    data_rank: np.ndarray
    """int64 [n]: data shard of the policy that trains it"""
    advantages: np.ndarray
    """float64 [n]: advantage of the whole answer; before a token-level estimator, its shaped score"""
    weights: np.ndarray
    """float64 [n]: weight of each token of the sample in its mini-batch"""
    minibatches: np.ndarray
    """int64 [n]: number of the optimizer step that uses the sample; ascending"""
    masked: tuple[tuple[Key, str], ...]
    """samples that have a score and do not train, each with the reason"""
    stale: bool
    """some sample holds tokens of an older policy version"""
    balance: float
    """work of the slowest rank over the mean, summed over the optimizer steps; 1 is perfect"""
    mean_reward: float
    """of the shaped scores; 0 without any"""

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
    collected: Collected,
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
    scored, running = shape(data, settings, running, max_tokens, extra)
    estimator = answer_advantage(settings)
    advantages = estimator(scored) if estimator else scored.scores  # a token-level estimator starts from these
    masked, weights = mask(data, settings)
    kept = np.delete(np.arange(len(data.answers)), list(masked)) if masked else slice(None)
    answers, sampled = data.answers[kept], data.lengths[kept]
    minibatches = divide(answers["ticket"], num_updates)
    bounds = minibatches.searchsorted(np.arange(num_updates + 1)).tolist()
    aggregate = bind(AGGREGATIONS[settings.loss_agg], settings)
    for begin, end in pairwise(bounds):
        weights[begin:end] *= aggregate(sampled[begin:end])
    samples = np.stack([answers[name] for name in ("ticket", "unit", "num_prompt_tokens", "num_tokens")], axis=1)
    data_rank, imbalance = assign(samples, bounds, num_shards, hidden_size)
    made = Plan(
        step=collected.step,
        keys=np.stack((answers["ticket"], answers["answer"]), axis=1),
        units=answers["unit"].astype(np.int64),
        lengths=answers["num_tokens"].astype(np.int64),
        num_prompt_tokens=answers["num_prompt_tokens"].astype(np.int64),
        num_sampled=sampled.numpy(),
        src_rank=answers["rank"].astype(np.int64),
        data_rank=data_rank,
        advantages=advantages[kept].numpy(),
        weights=weights.numpy(),
        minibatches=minibatches,
        masked=data.excluded + tuple(zip(keys(data.answers[list(masked)]), masked.values(), strict=True)),
        stale=bool((answers["lag"] > 0).any()),
        balance=imbalance,
        mean_reward=float(scored.scores.mean()) if len(scored.scores) else 0.0,
    )
    return made, running
