"""`Preference`: a step of learning from pairs of answers, or from single answers labelled good or bad.

A comparison's loss is put on the first learnt token of its first answer. Both answers of a pair are in one micro-batch
(`Sample.unit`). Rewards and similar metrics are means over comparisons.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from spmd_rl.algo.inputs import Judged, Pairs
from spmd_rl.algo.preference import JUDGED_LOSSES, PAIR_LOSSES
from spmd_rl.batch import Batch
from spmd_rl.config.sections.preference import PreferenceConfig
from spmd_rl.learn.advantages import Samples
from spmd_rl.learn.custom import bind
from spmd_rl.learn.imitation import Imitation, RowLog, Term
from spmd_rl.rollout.row_source import CHOSEN, MISMATCHED, REJECTED
from spmd_rl.train.base import Metrics, PolicyRole
from spmd_rl.types import Sample


class Preference(Imitation):
    """One step on preferences; samples have the reference's logprobs."""

    def __init__(self, settings: PreferenceConfig, policy: PolicyRole, num_updates: int) -> None:
        super().__init__(policy, num_updates, name="dpo/loss")
        self._settings = settings

    def annotate(self, batch: Batch, samples: Sequence[Sample]) -> None:
        """Set `reference_sums`, if the loss has a reference."""
        if self._settings.uses_reference:
            # Here `Sample.targets` has the reference's logprob of the answer.
            batch.reference_sums = torch.tensor([sum(sample.targets) for sample in samples], dtype=torch.float32)

    def bind(self, batch: Batch, number: int) -> Term:
        """[all] Return the loss of a mini-batch; every comparison weighs the same."""
        settings, plan, baseline = self._settings, self.plan, 0.0
        answers = plan.keys[plan.minibatches == number, 1]
        num_chosen, num_rejected = int((answers == CHOSEN).sum()), int((answers == REJECTED).sum())
        if settings.is_judged:
            baseline = self._baseline(batch)  # [all]
            batch = batch.select((batch.keys[:, 1] != MISMATCHED).nonzero()[:, 0])
        count = num_chosen + num_rejected * settings.is_judged
        batch.weights = batch.loss_mask / max(count, 1)
        num_tokens = int(plan.num_sampled[plan.minibatches == number][answers != MISMATCHED].sum())
        sides = {"chosen": num_chosen, "rejected": num_rejected}
        scales = {side: num_tokens / number for side, number in sides.items() if number}
        losses = JUDGED_LOSSES if settings.is_judged else PAIR_LOSSES
        compare = partial(_judge if settings.is_judged else _compare, bind(losses[settings.loss], settings), baseline)
        return Term(batch, partial(_loss, compare, settings, scales), count, sides if settings.is_judged else {})

    def update(self, terms: list[Term]) -> Metrics:
        """[all] Update the policy, see `Imitation.update`."""
        return self._with_margins(super().update(terms), "rewards")  # [all]

    def measure(self, parts: Iterable[Samples], log: RowLog = lambda step, scores: None) -> Metrics:
        """[all] Return the loss on held-out samples, see `Imitation.measure`."""
        return self._with_margins(super().measure(parts, log), "val/rewards")  # [all]

    def _with_margins(self, metrics: Metrics, section: str) -> Metrics:
        sides = [metrics.get(f"{section}/{side}") for side in ("chosen", "rejected")]
        if not self._settings.is_judged or None in sides:
            return metrics
        return {**metrics, f"{section}/margins": sides[0] - sides[1]}

    def _baseline(self, batch: Batch) -> float:
        """[all] Return the mean reward of answers to other prompts, at least 0."""
        others = batch.select((batch.keys[:, 1] == MISMATCHED).nonzero()[:, 0])
        with self.policy.awake():
            logprobs, _ = self.policy.logprobs(others, 1.0)  # [all]
        answers = _Answers(logprobs[others.sampled.index], others)
        # The sum over an answer's tokens is its log ratio to the reference.
        ratios = logprobs.index_add(0, others.sampled.index[answers.first], -answers.reference)
        sums = {"sum": float(ratios.double().sum()), "count": float(others.num_samples)}
        found = self.policy.layout.data.reduce("prepare: baseline", sums, "sum")  # [all]
        return max(0.0, found["sum"] / max(found["count"], 1.0))


class _Answers:
    """Sums over the learnt tokens of each answer, [S], and masks of the chosen and the rejected ones."""

    def __init__(self, logprobs: Tensor, batch: Batch) -> None:
        samples = batch.sampled.samples
        self.lengths = torch.bincount(samples, minlength=batch.num_samples)
        self.first = self.lengths.cumsum(0) - self.lengths  # among the N learnt tokens
        zeros = logprobs.new_zeros(batch.num_samples)
        self.logprobs = zeros.index_add(0, samples, logprobs)
        self.reference = zeros if batch.reference_sums is None else batch.reference_sums
        self.chosen, self.rejected = ((batch.keys[:, 1] == side).nonzero()[:, 0] for side in (CHOSEN, REJECTED))


def _compare(function: Callable[[Pairs], Tensor], baseline: float, answers: _Answers) -> tuple[Tensor, Tensor]:
    ratios, lengths = answers.logprobs - answers.reference, answers.lengths
    chosen, rejected = answers.chosen, answers.rejected
    return chosen, function(Pairs(ratios[chosen], ratios[rejected], lengths[chosen], lengths[rejected]))


def _judge(function: Callable[[Judged], Tensor], baseline: float, answers: _Answers) -> tuple[Tensor, Tensor]:
    judged = torch.cat([answers.chosen, answers.rejected])
    desirable = torch.arange(len(judged), device=judged.device) < len(answers.chosen)
    ratios = (answers.logprobs - answers.reference)[judged]
    return judged, function(Judged(ratios, desirable, baseline))


def _loss(
    compare: Callable[[_Answers], tuple[Tensor, Tensor]],
    settings: PreferenceConfig,
    scales: Mapping[str, float],
    logprobs: Tensor,
    entropy: Tensor,
    batch: Batch,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    # `Preference.bind` fills the first three arguments.
    # A metric of an answer is put on one token and averaged over tokens, so it is multiplied by its scale: learnt
    # tokens of the mini-batch per chosen or rejected answer.
    answers = _Answers(logprobs, batch)
    places, losses = compare(answers)
    rewards = settings.beta * (answers.logprobs - answers.reference).detach()
    if settings.loss == "simpo":
        rewards = rewards / answers.lengths
    places_of = {"chosen": answers.chosen, "rejected": answers.rejected}

    def spread(side: str, values: Tensor) -> Tensor:
        scaled = scales[side] * values.detach().to(entropy.dtype)
        return torch.zeros_like(entropy).index_add(0, answers.first[places_of[side]], scaled)

    quantities = {"actor/entropy": entropy.detach()}
    for name, values in (("rewards", rewards), ("logps", answers.logprobs)):
        quantities |= {f"{name}/{side}": spread(side, values[places_of[side]]) for side in scales}
    if not settings.is_judged:
        quantities["rewards/margins"] = quantities["rewards/chosen"] - quantities["rewards/rejected"]
        right = rewards[answers.chosen] > rewards[answers.rejected]
        quantities["rewards/accuracies"] = spread("chosen", right)
    # A filler micro-batch has no pair, but needs a graph for the backward pass.
    return (0.0 * logprobs).index_add(0, answers.first[places], losses), quantities
