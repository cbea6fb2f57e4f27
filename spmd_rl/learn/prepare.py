"""The plan of a step: every cross-sample number, computed over the global batch.

All ranks hold the metadata of all samples (`Outcome`), so each computes the same advantages, token weights and
distribution of the samples over the ranks, in (ticket, answer) order. Nothing here meets other ranks; `exchange.py`
carries the plan out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from spmd_rl.algo import ADVANTAGES, AGGREGATIONS
from spmd_rl.algo.moments import Moments
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn import balance
from spmd_rl.learn.binding import bind
from spmd_rl.learn.scores import Key, Metadata, left_out, loss_weights, shape
from spmd_rl.rollout import Collected


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank computes alike from the metadata of a step. One entry per sample that trains, in order."""

    step: int
    keys: tuple[Key, ...]
    """(ticket, answer)"""
    lengths: tuple[int, ...]
    """tokens of the sample, prompt included"""
    num_sampled: tuple[int, ...]
    """tokens among them that the policy sampled"""
    holders: tuple[int, ...]
    """rank that generated the sample"""
    trainers: tuple[int, ...]
    """rank that trains it"""
    advantages: tuple[float, ...]
    """advantage of the whole answer; before a token-level estimator, its shaped score"""
    weights: tuple[float, ...]
    """weight of each token of the sample in its mini-batch"""
    minibatches: tuple[int, ...]
    """number of the optimizer step that uses the sample"""
    left_out: tuple[tuple[Key, str], ...]
    """samples that have a score and do not train, each with the reason"""
    stale: bool
    """some sample holds tokens of an older policy version"""
    balance: float
    """work of the slowest rank over the mean, summed over the optimizer steps; 1 is perfect"""
    mean_reward: float
    """of the shaped scores; 0 without any"""

    def columns(self) -> tuple:
        """Everything, for a hash that ranks compare."""
        return tuple(getattr(self, field.name) for field in fields(self))


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
    extra = None if penalties is None else torch.tensor([penalties[key] for key in keys], dtype=torch.float64)
    scored, running = shape(data, settings, running, max_tokens, extra)
    advantages = scored.scores  # a token-level estimator starts from these
    if settings.advantage in ADVANTAGES:
        advantages = bind(ADVANTAGES[settings.advantage], settings)(scored)
    reasons = left_out(data, settings)
    kept = torch.tensor([row for row, reason in enumerate(reasons) if reason is None], dtype=torch.int64)
    tickets, sampled = data.groups[kept].tolist(), data.lengths[kept]
    place = {ticket: i for i, ticket in enumerate(dict.fromkeys(tickets))}
    minibatches = torch.tensor([place[t] * num_updates // len(place) for t in tickets], dtype=torch.int64)
    weights = loss_weights(data, settings, kept)
    for number in range(num_updates):
        chosen = minibatches == number
        weights[chosen] *= bind(AGGREGATIONS[settings.loss_agg], settings)(sampled[chosen])
    answers = [data.answers[row] for row in kept.tolist()]
    samples = [(ticket, a.num_prompt_tokens, a.num_tokens) for ticket, a in zip(tickets, answers, strict=True)]
    trainers, spread = assign(samples, minibatches.tolist(), num_ranks, hidden_size)
    made = Plan(
        step=collected.step,
        keys=tuple(keys[row] for row in kept.tolist()),
        lengths=tuple(a.num_tokens for a in answers),
        num_sampled=tuple(sampled.tolist()),
        holders=tuple(a.rank for a in answers),
        trainers=tuple(trainers),
        advantages=tuple(advantages[kept].tolist()),
        weights=tuple(weights.tolist()),
        minibatches=tuple(minibatches.tolist()),
        left_out=data.aside + tuple((keys[row], reason) for row, reason in enumerate(reasons) if reason is not None),
        stale=any(a.stale for a in answers),
        balance=spread,
        mean_reward=float(scored.scores.mean()) if len(scored.scores) else 0.0,
    )
    return made, running


def assign(
    samples: Sequence[balance.Item], minibatches: Sequence[int], num_ranks: int, hidden_size: int
) -> tuple[list[int], float]:
    """The rank that trains each sample, and `Plan.balance`. Every mini-batch is balanced by itself: ranks wait for
    each other at the end of each."""
    trainers = [0] * len(samples)
    slowest = total = 0
    for number in sorted(set(minibatches)):
        rows = [row for row, m in enumerate(minibatches) if m == number]
        ranks, loads = balance.assign([samples[row] for row in rows], num_ranks, hidden_size)
        for row, rank in zip(rows, ranks, strict=True):
            trainers[row] = rank
        slowest, total = slowest + max(loads), total + sum(loads)
    return trainers, slowest * num_ranks / total if total else 1.0
