"""The plan of a step: every cross-sample number, computed over the global batch.

All ranks hold the metadata of all samples (`outcomes.ANSWER`), so each computes the same advantages, token weights and
distribution of the samples over the ranks, in (ticket, answer) order. Nothing here meets other ranks; `exchange.py`
carries the plan out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from spmd_rl.algo import ADVANTAGES, AGGREGATIONS
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import column
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn import balance
from spmd_rl.learn.binding import bind
from spmd_rl.learn.scores import Key, Metadata, keys, left_out, loss_weights, shape
from spmd_rl.rollout import Collected


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank computes alike from the metadata of a step. One row per sample that trains, in order; n rows."""

    step: int
    keys: np.ndarray
    """int64 [n, 2]: (ticket, answer)"""
    lengths: np.ndarray
    """int64 [n]: tokens of the sample, prompt included"""
    num_sampled: np.ndarray
    """int64 [n]: tokens among them that the policy sampled"""
    holders: np.ndarray
    """int64 [n]: rank that generated the sample"""
    trainers: np.ndarray
    """int64 [n]: rank that trains it"""
    advantages: np.ndarray
    """float64 [n]: advantage of the whole answer; before a token-level estimator, its shaped score"""
    weights: np.ndarray
    """float64 [n]: weight of each token of the sample in its mini-batch"""
    minibatches: np.ndarray
    """int64 [n]: number of the optimizer step that uses the sample"""
    left_out: tuple[tuple[Key, str], ...]
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


def plan(
    collected: Collected,
    settings: AlgorithmConfig,
    running: Moments,
    *,
    num_updates: int,
    num_ranks: int,
    hidden_size: int,
    max_tokens: int,
    greedy_answer: int | None = None,
    penalties: Mapping[Key, float] | None = None,
) -> tuple[Plan, Moments]:
    """Advantages, weights and the distribution over the ranks; and the moments of the run's scores.

    running: those moments before this step. num_updates: optimizer steps, between which the tickets are divided in
    order. num_ranks: data-parallel ranks, over which the samples of each of them are spread. hidden_size: the
    policy's, for the work that a sample makes. max_tokens: of an answer. greedy_answer:
    the number of the answer that is a baseline, if there is one. penalties: added to the scores.
    """
    data = Metadata.of(collected, greedy_answer)
    extra = None if penalties is None else column([penalties[key] for key in keys(data.answers)], np.float64)
    scored, running = shape(data, settings, running, max_tokens, extra)
    advantages = scored.scores  # a token-level estimator starts from these
    if settings.advantage in ADVANTAGES:
        advantages = bind(ADVANTAGES[settings.advantage], settings)(scored)
    reasons = left_out(data, settings)
    kept = np.delete(np.arange(len(data.answers)), list(reasons)) if reasons else slice(None)
    answers, sampled = data.answers[kept], data.lengths[kept]
    minibatches = divide(answers["ticket"], num_updates)
    bounds = minibatches.searchsorted(np.arange(num_updates + 1)).tolist()
    weights = loss_weights(data, settings, kept)
    aggregate = bind(AGGREGATIONS[settings.loss_agg], settings)
    for begin, end in pairwise(bounds):
        weights[begin:end] *= aggregate(sampled[begin:end])
    trainers, spread = assign(answers, bounds, num_ranks, hidden_size)
    made = Plan(
        step=collected.step,
        keys=np.stack((answers["ticket"], answers["answer"]), axis=1),
        lengths=answers["num_tokens"].astype(np.int64),
        num_sampled=sampled.numpy(),
        holders=answers["rank"].astype(np.int64),
        trainers=trainers,
        advantages=advantages[kept].numpy(),
        weights=weights.numpy(),
        minibatches=minibatches,
        left_out=data.aside + tuple(zip(keys(data.answers[list(reasons)]), reasons.values(), strict=True)),
        stale=bool(answers["stale"].any()),
        balance=spread,
        mean_reward=float(scored.scores.mean()) if len(scored.scores) else 0.0,
    )
    return made, running


def divide(tickets: np.ndarray, num_updates: int) -> np.ndarray:
    """The mini-batch of each sample: tickets (int64 [n], those of one side by side) in order, as evenly as they go."""
    if num_updates == 1:
        return np.zeros(len(tickets), np.int64)
    places = balance.begins(tickets).cumsum() - 1
    return places * num_updates // (places[-1:] + 1)


def assign(answers: np.ndarray, bounds: Sequence[int], num_ranks: int, hidden_size: int) -> tuple[np.ndarray, float]:
    """The rank that trains each sample (see `balance.assign`), and `Plan.balance`. bounds: of the mini-batches.

    Every mini-batch is balanced by itself: ranks wait for each other at the end of each.
    """
    trainers = np.zeros(len(answers), np.int64)
    if num_ranks == 1:
        return trainers, 1.0
    samples = np.stack([answers[name] for name in ("ticket", "num_prompt_tokens", "num_tokens")], axis=1)
    slowest = total = 0
    for begin, end in pairwise(bounds):
        trainers[begin:end], loads = balance.assign(samples[begin:end], num_ranks, hidden_size)
        slowest, total = slowest + max(loads), total + sum(loads)
    return trainers, slowest * num_ranks / total if total else 1.0
