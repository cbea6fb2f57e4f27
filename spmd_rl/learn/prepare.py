"""From judged groups to packed mini-batches, with every cross-sample number computed over the global batch.

All ranks hold the metadata of all samples (`Outcome`), so each computes the same advantages and token weights, in
(ticket, answer) order, and fills in those of its own samples. Nothing here meets other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmd_rl.algo import ADVANTAGES, AGGREGATIONS
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.rollout import Collected

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank computes alike from the metadata of a step."""

    keys: tuple[Key, ...]
    """(ticket, answer) of every sample that trains, in order"""
    advantages: tuple[float, ...]
    """one per sample"""
    weights: tuple[float, ...]
    """weight of each token of the sample in its mini-batch"""
    minibatches: tuple[int, ...]
    """number of the optimizer step that uses the sample"""
    stale: bool
    """some sample holds tokens of an older policy version"""


def plan(collected: Collected, settings: AlgorithmConfig, num_updates: int) -> Plan:
    """Advantages and weights of the step. A verdict that is no score takes its sample out of baseline and batch."""
    rows = [(o.ticket, a) for o in collected.accepted for a in o.answers if a.scored and a.num_answer_tokens]
    tickets = torch.tensor([ticket for ticket, _ in rows], dtype=torch.int64)
    scores = torch.tensor([a.score for _, a in rows], dtype=torch.float64)
    lengths = torch.tensor([a.num_answer_tokens for _, a in rows], dtype=torch.int64)
    aggregate = AGGREGATIONS[settings.loss_agg]
    advantages = ADVANTAGES[settings.advantage](scores, tickets, norm_std=settings.norm_std)
    place = {ticket: i for i, ticket in enumerate(dict.fromkeys(tickets.tolist()))}
    minibatches = torch.tensor([place[t] * num_updates // len(place) for t in tickets.tolist()], dtype=torch.int64)
    weights = torch.zeros(len(rows), dtype=torch.float64)
    for number in range(num_updates):
        chosen = minibatches == number
        weights[chosen] = aggregate(lengths[chosen])
    return Plan(
        keys=tuple((ticket, a.answer) for ticket, a in rows),
        advantages=tuple(advantages.tolist()),
        weights=tuple(weights.tolist()),
        minibatches=tuple(minibatches.tolist()),
        stale=any(a.stale for _, a in rows),
    )


def batches(collected: Collected, plan: Plan, num_updates: int) -> list[Batch]:
    """This rank's samples as one packed batch per optimizer step; any of them may be empty."""
    samples = {sample.key: sample for group in collected.groups for sample in group.samples}
    rows: Sequence[tuple[Key, float, float, int]] = list(
        zip(plan.keys, plan.advantages, plan.weights, plan.minibatches, strict=True)
    )
    result = []
    for number in range(num_updates):
        mine = [(key, advantage, weight) for key, advantage, weight, m in rows if m == number and key in samples]
        batch = pack(samples[key] for key, _, _ in mine)
        lengths = batch.starts.diff()
        mask = batch.loss_mask.float()
        advantages = torch.tensor([a for _, a, _ in mine], dtype=torch.float32)
        weights = torch.tensor([w for _, _, w in mine], dtype=torch.float32)
        batch.advantages = advantages.repeat_interleave(lengths) * mask
        batch.weights = weights.repeat_interleave(lengths) * mask
        result.append(batch)
    return result
