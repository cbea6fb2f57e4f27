"""The plan of a step: every cross-sample number, computed over the global batch.

All ranks hold the metadata of all samples (`Outcome`), so each computes the same advantages, token weights and
distribution of the samples over the ranks, in (ticket, answer) order. Nothing here meets other ranks; `exchange.py`
carries the plan out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from spmd_rl.algo import ADVANTAGES, AGGREGATIONS
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import column
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn import balance
from spmd_rl.learn.binding import bind
from spmd_rl.learn.scores import Key, Metadata, left_out, loss_weights, shape
from spmd_rl.rollout import Collected


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank computes alike from the metadata of a step. One row per sample that trains, in order; n rows."""

    step: int
    keys: Tensor
    """int64 [n, 2]: (ticket, answer)"""
    lengths: Tensor
    """int64 [n]: tokens of the sample, prompt included"""
    num_sampled: Tensor
    """int64 [n]: tokens among them that the policy sampled"""
    holders: Tensor
    """int64 [n]: rank that generated the sample"""
    trainers: Tensor
    """int64 [n]: rank that trains it"""
    advantages: Tensor
    """float64 [n]: advantage of the whole answer; before a token-level estimator, its shaped score"""
    weights: Tensor
    """float64 [n]: weight of each token of the sample in its mini-batch"""
    minibatches: Tensor
    """int64 [n]: number of the optimizer step that uses the sample"""
    left_out: tuple[tuple[Key, str], ...]
    """samples that have a score and do not train, each with the reason"""
    stale: bool
    """some sample holds tokens of an older policy version"""
    balance: float
    """work of the slowest rank over the mean, summed over the optimizer steps; 1 is perfect"""
    mean_reward: float
    """of the shaped scores; 0 without any"""

    def columns(self) -> tuple:
        """Everything as plain values, for a hash that ranks compare."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value.tolist() if isinstance(value, Tensor) else value for value in values)


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
    keys = data.keys
    extra = None if penalties is None else column([penalties[key] for key in keys], np.float64)
    scored, running = shape(data, settings, running, max_tokens, extra)
    advantages = scored.scores  # a token-level estimator starts from these
    if settings.advantage in ADVANTAGES:
        advantages = bind(ADVANTAGES[settings.advantage], settings)(scored)
    reasons = left_out(data, settings)
    rows = [row for row in range(len(keys)) if row not in reasons]
    kept, answers = column(rows), [data.answers[row] for row in rows]
    tickets, sampled = data.groups[kept], data.lengths[kept]
    minibatches = divide(tickets, num_updates)
    weights = loss_weights(data, settings, kept)
    aggregate = bind(AGGREGATIONS[settings.loss_agg], settings)
    for number in range(num_updates):
        chosen = (minibatches == number).nonzero().flatten()
        weights[chosen] *= aggregate(sampled[chosen])
    lengths = column([a.num_tokens for a in answers])
    work = torch.stack((tickets, column([a.num_prompt_tokens for a in answers]), lengths), dim=1)
    trainers, spread = assign(work, minibatches, num_ranks, hidden_size)
    made = Plan(
        step=collected.step,
        keys=torch.stack((tickets, column([a.answer for a in answers])), dim=1),
        lengths=lengths,
        num_sampled=sampled,
        holders=column([a.rank for a in answers]),
        trainers=trainers,
        advantages=advantages[kept],
        weights=weights,
        minibatches=minibatches,
        left_out=data.aside + tuple((keys[row], reason) for row, reason in reasons.items()),
        stale=any(a.stale for a in answers),
        balance=spread,
        mean_reward=float(scored.scores.mean()) if len(scored.scores) else 0.0,
    )
    return made, running


def divide(tickets: Tensor, num_updates: int) -> Tensor:
    """The mini-batch of each sample: tickets (int64 [n], those of one side by side) in order, as evenly as they go."""
    _, places = torch.unique_consecutive(tickets, return_inverse=True)
    return places * num_updates // (places[-1:] + 1)


def assign(samples: Tensor, minibatches: Tensor, num_ranks: int, hidden_size: int) -> tuple[Tensor, float]:
    """The rank that trains each sample (see `balance.assign`), and `Plan.balance`.

    Every mini-batch is balanced by itself: ranks wait for each other at the end of each.
    """
    trainers = torch.zeros_like(minibatches)
    if num_ranks == 1:
        return trainers, 1.0
    slowest = total = 0
    for number in minibatches.unique().tolist():
        chosen = (minibatches == number).nonzero().flatten()
        trainers[chosen], loads = balance.assign(samples[chosen], num_ranks, hidden_size)
        slowest, total = slowest + max(loads), total + sum(loads)
    return trainers, slowest * num_ranks / total if total else 1.0
