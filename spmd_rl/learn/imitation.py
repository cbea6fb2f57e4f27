"""`Imitation`: supervised learning on the learnt tokens of samples: sampled ones, or the answers of rows."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmd_rl.algo import AGGREGATIONS
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AgenticConfig
from spmd_rl.learn.advantages import Samples, all_alike
from spmd_rl.learn.losses import mean_over, measure, nll, nothing
from spmd_rl.learn.prepare import Shares, UpdatePlan, plan
from spmd_rl.learn.teachers import Teachers
from spmd_rl.learn.transfer import redistribute
from spmd_rl.rollout.row_source import num_empty
from spmd_rl.train.base import BoundLoss, BoundValueLoss, CriticRole, Metrics, PolicyRole, Role
from spmd_rl.types import Sample


class Term(NamedTuple):
    """Objective of one optimizer step."""

    batch: Batch
    """this rank's share, with weights"""
    loss: BoundLoss | BoundValueLoss
    count: float
    """tokens or comparisons of the global batch that the loss averages over"""
    sides: Mapping[str, int] = MappingProxyType({})
    """Answers of the global batch that a metric averages over, by the last part of its name, such as `chosen`; 0 leaves
    it out.
    """

    def weight(self, name: str, otherwise: float) -> float:
        """Return the weight of a metric when terms are averaged."""
        return self.sides.get(name.rpartition("/")[2], otherwise)


def deal(
    collected: Samples, count: int, role: Role, annotate: Callable[[Batch, Sequence[Sample]], None] | None = None
) -> tuple[UpdatePlan, list[Batch]]:
    """[all] Return the plan in which all learnt tokens of an optimizer step weigh the same, and this rank's share of
    each of the `count` steps.

    annotate: see `Imitation.annotate`.
    """
    world, data = role.layout.world, role.layout.data
    with world.phase("coordination"):
        shares = Shares(count, data.size, role.hidden_size)
        made = plan(collected.step, all_alike(collected.table), shares, AGGREGATIONS["token-mean"])
    own = made.samples_of(collected.groups, world.rank)
    packed = pack(own, collected.step - 1, seen=role.sees)
    if annotate:
        annotate(packed, own)
    return made, redistribute(packed, made, count, data, world)  # [all]


RowLog = Callable[[int, Mapping[tuple[int, int], float]], None]
"""Log of held-out rows: (step, score of each row of this rank by ticket and answer)."""


class Imitation:
    """One supervised step on the sampled tokens of what was collected, `-mean log pi(t)`.

    A subclass overrides `bind` for another loss, and `annotate` for its targets.
    """

    def __init__(
        self,
        policy: PolicyRole | CriticRole,
        num_updates: int,
        temperature: float = 1.0,
        lr_factor: float = 1.0,
        name: str = "warmup/loss",
        teachers: Teachers | None = None,
    ) -> None:
        """num_updates: optimizer steps per step. lr_factor: multiplies the learning rate. name: metric of the loss.
        teachers: alternatives to each token.
        """
        self.policy, self._world, self._num_updates = policy, policy.layout.world, num_updates
        self._temperature, self._lr_factor, self._name = temperature, lr_factor, name
        self._teachers = teachers
        self._loss = teachers.loss(nothing if teachers.is_only else nll) if teachers else nll
        self.plan: UpdatePlan | None = None

    @classmethod
    def of(cls, cfg: AgenticConfig, policy: PolicyRole) -> "Imitation":
        """Return the supervised steps of a run at `warmup.lr`, by default the policy's."""
        # A factor, since the role's schedule knows `policy.lr` alone; where that is 0, nothing is trained.
        lr_factor = (cfg.warmup.lr or cfg.policy.lr) / (cfg.policy.lr or 1.0)
        return cls(policy, cfg.train.updates_per_step, cfg.rollout.temperature, lr_factor)

    def annotate(self, batch: Batch, samples: Sequence[Sample]) -> None:
        """Set the target columns of `batch`; by default none."""

    def bind(self, batch: Batch, number: int) -> Term:
        """[all] Return the loss of mini-batch `number`; every token weighs the same."""
        return Term(batch, nll, float(self.plan.num_sampled[self.plan.minibatches == number].sum()))

    def step(self, term: Term) -> Metrics:
        """[all] Run one optimizer step."""
        return self.policy.update(term.batch, term.loss, self._temperature)  # [all]

    def outputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """[all] Return the inputs of the loss, float32 [T] each."""
        return self.policy.logprobs(batch, self._temperature)  # [all]

    def prepare(self, collected: Samples) -> list[Term]:
        """[all] Return this rank's terms, one per optimizer step."""
        terms = self._prepare(collected, self._num_updates)  # [all]
        if self._teachers:
            with self._world.phase("logprobs"):
                self._teachers.fill_in([term.batch for term in terms], self.plan, collected.table)  # [all]
            terms = [term._replace(loss=self._loss) for term in terms]
        return terms

    def _prepare(self, collected: Samples, count: int) -> list[Term]:
        with self._world.phase("prepare"):
            self.plan, batches = deal(collected, count, self.policy, self.annotate)  # [all]
            return [self.bind(batch, number) for number, batch in enumerate(batches)]  # [all]

    def update(self, terms: list[Term]) -> Metrics:
        """[all] Update; the reported loss is the mean negative log-likelihood of a token, in nats."""
        used = [terms[i] for i in np.unique(self.plan.minibatches).tolist()]
        self.policy.lr_factor = self._lr_factor
        with self._world.phase("update"), self.policy.awake():
            found = [self.step(one) for one in used]  # [all]
        self.policy.lr_factor = 1.0
        found = [{self._name: one.pop("loss"), **one} for one in found]
        metrics = mean_over(found, "actor", lambda number, key: used[number].weight(key, 1.0))
        return metrics | self.plan.metrics()

    def measure(self, parts: Iterable[Samples], log: RowLog = lambda step, scores: None) -> Metrics:
        """[all] Return the loss on held-out samples as `val/*`, equal on all ranks. parts: [all] equally many on each
        rank.

        log: gets each sample's mean logprob, or critic's value, over its learnt tokens.
        """
        sums, counts, overlong = defaultdict[str, float](float), defaultdict[str, float](float), None
        scores = dict[tuple[int, int], float]()
        with self._world.phase("eval"):
            for collected in parts:  # [all] have as many
                overlong = (overlong or 0) + num_empty(collected)
                (one,) = self._prepare(collected, 1)  # [all]
                with self.policy.awake():
                    outputs = self.outputs(one.batch)  # [all]
                    found = measure(self.policy.layout.data, one.batch, outputs, one.loss)  # [all]
                if self.policy.layout.data.is_leader:
                    scores |= _mean_by_sample(one.batch, outputs[0])
                for name, value in found.items():
                    weight = one.weight(name, one.count)
                    sums[name] += weight * value
                    counts[name] += weight
            if overlong is not None:
                log(collected.step, scores)
        means = {f"val/{name.removeprefix('actor/')}": sums[name] / counts[name] for name in sums if counts[name]}
        return means if overlong is None else {**means, "val/overlong": float(overlong)}


def _mean_by_sample(batch: Batch, values: Tensor) -> dict[tuple[int, int], float]:
    samples = batch.sampled.samples
    counts = torch.bincount(samples, minlength=batch.num_samples).clamp(min=1)
    sums = values.new_zeros(batch.num_samples).index_add(0, samples, values[batch.sampled.index])
    return dict(zip(map(tuple, batch.keys.tolist()), (sums / counts).tolist(), strict=True))
