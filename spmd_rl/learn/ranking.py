"""`Ranking`, `Judging`: one step of a reward model on pairs of answers, or on labels."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from spmd_rl.algo.preference import binary, bradley_terry
from spmd_rl.batch import Batch
from spmd_rl.config.supervised import RewardModelConfig
from spmd_rl.learn.imitation import Imitation, Term
from spmd_rl.rollout.row_source import CHOSEN, REJECTED
from spmd_rl.train.base import CriticRole, Metrics
from spmd_rl.types import Sample

TOKENS_PER_PAIR = 2
"""Learnt tokens per pair: one after each conversation, at whose prediction the value is the reward."""


class Judging(Imitation):
    """One step on answers labelled right or wrong, as a whole or by step."""

    def __init__(self, critic: CriticRole, num_updates: int) -> None:
        super().__init__(critic, num_updates, name="reward_model/loss")

    @staticmethod
    def of(cfg: RewardModelConfig, critic: CriticRole) -> "Judging":
        """Return the learner that `head` selects."""
        if cfg.head == "pairwise":
            return Ranking(critic, cfg.train.updates_per_step, cfg.center_coef)
        return Judging(critic, cfg.train.updates_per_step)

    def annotate(self, batch: Batch, samples: Sequence[Sample]) -> None:
        """Set `labels`: each learnt token ends an answer or a step."""
        labels = torch.tensor([label for sample in samples for label in sample.targets], dtype=torch.float32)
        batch.labels = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask, labels)

    def bind(self, batch: Batch, number: int) -> Term:
        """Return the loss of a mini-batch, see `Imitation.bind`."""
        count = int(self.plan.num_sampled[self.plan.minibatches == number].sum())
        batch.weights = batch.loss_mask / max(count, 1)
        return Term(batch, _label_loss, count)

    def step(self, term: Term) -> Metrics:
        """[all] Run one optimizer step of the critic."""
        return self.policy.update(term.batch, term.loss)  # [all]

    def outputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """[all] Return the critic's values, see `Imitation.outputs`."""
        return (self.policy.values(batch),)  # [all]


class Ranking(Judging):
    """One step on pairs of whole conversations; samples have the pair's margin."""

    def __init__(self, critic: CriticRole, num_updates: int, center_coef: float) -> None:
        super().__init__(critic, num_updates)
        self._pair_loss = partial(_pair_loss, center_coef)

    def annotate(self, batch: Batch, samples: Sequence[Sample]) -> None:
        """Set `margins`."""
        batch.margins = torch.tensor([sum(sample.targets) for sample in samples], dtype=torch.float32)

    def bind(self, batch: Batch, number: int) -> Term:
        """Set `margins` of pairs from their samples."""
        count = int((self.plan.minibatches == number).sum()) // TOKENS_PER_PAIR
        batch.weights = batch.loss_mask / max(count, 1)
        return Term(batch, self._pair_loss, count)


def _label_loss(values: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    labels = batch.labels[batch.sampled.index]
    right = (values.detach() > 0) == (labels > 0)
    return binary(values, labels), {"rewards/mean": values.detach(), "rewards/accuracies": right.to(values.dtype)}


def _pair_loss(center_coef: float, values: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    chosen, rejected = ((batch.keys[:, 1] == side).nonzero()[:, 0] for side in (CHOSEN, REJECTED))
    pair = values[chosen], values[rejected]
    loss = (0.0 * values).index_add(0, chosen, bradley_terry(*pair, batch.margins[chosen], center_coef=center_coef))

    def spread(found: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, chosen, TOKENS_PER_PAIR * found.detach().to(values.dtype))

    return loss, {
        "rewards/chosen": spread(pair[0]),
        "rewards/rejected": spread(pair[1]),
        "rewards/margins": spread(pair[0] - pair[1]),
        "rewards/accuracies": spread(pair[0] > pair[1]),
    }
