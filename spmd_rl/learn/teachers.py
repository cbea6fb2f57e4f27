"""`Teachers`: logprobs of frozen models at each sampled token, and the loss that learns from them.

A teacher may have another layout. It sends the logprobs of its k most likely tokens; the student computes those of the
same tokens, with gradient.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spmd_rl.algo.distillation import distillation
from spmd_rl.batch import Batch, Ragged, bounds_of, run_indices
from spmd_rl.config.schema import TeachersConfig
from spmd_rl.learn.hints import Hints, Render, at_answers, with_hints
from spmd_rl.learn.prepare import UpdatePlan
from spmd_rl.learn.transfer import RoleShards
from spmd_rl.rollout.table import SampleTable
from spmd_rl.train import Roles
from spmd_rl.train.base import BoundLoss, PolicyRole

COLUMNS = ("teacher_logprobs", "teacher_ids", "teacher_top")


class Teachers:
    """The teachers of a run, by domain."""

    def __init__(
        self,
        teachers: Mapping[str, PolicyRole],
        policy: PolicyRole,
        settings: TeachersConfig,
        temperature: float,
        render: Render | None = None,
    ) -> None:
        """teachers: by domain, '' for all others. render: a tokenizer's, for prompts with hints."""
        self._teachers, self._policy, self._settings = dict(teachers), policy, settings
        self._temperature, self._vocab_size = temperature, policy.size.head // policy.hidden_size
        self._k = min(settings.top_k, self._vocab_size)
        self.hints = Hints(settings.hints, render) if settings.hints and render else None
        """Source of `Batch.hints`; None if no teacher has one."""

    @classmethod
    def of(
        cls, roles: Roles, settings: TeachersConfig, temperature: float = 1.0, render: Render | None = None
    ) -> "Teachers | None":
        """Return the teachers of a run; None without any. One with a hint and no model is the policy."""
        teachers = {domain: roles.teachers.get(domain, roles.policy) for domain in settings.by_domain}
        return cls(teachers, roles.policy, settings, temperature, render) if teachers else None

    @property
    def is_only(self) -> bool:
        """See `teacher.only`: True if only teachers are learnt from."""
        return self._settings.only

    def fill_in(self, batches: Sequence[Batch], plan: UpdatePlan, table: SampleTable) -> None:
        """[all] Set the teacher columns of this rank's mini-batches."""
        world, dense = self._policy.layout.world, [_nothing(batch, self._k) for batch in batches]
        for domain, rows in self._rows(plan, table).items():
            teacher = self._teachers[domain]
            with teacher.awake():
                shards = RoleShards(self._policy, teacher, plan, world, rows)
                shares = shards.share("prepare: for the teacher", batches)  # [all]
                for share in shares:
                    shown = with_hints(share) if self.hints else share
                    found = teacher.top_logprobs(shown, self._temperature, self._k, self._vocab_size)  # [all]
                    found = at_answers(share, shown, *found) if self.hints else found
                    for column, values in zip(COLUMNS, found, strict=True):
                        setattr(share, column, values)
                back = shards.back("prepare: of the teacher", shares, COLUMNS)  # [all]
            for number, (batch, columns) in enumerate(zip(batches, back, strict=True)):
                samples = torch.from_numpy(shards.places(number))
                tokens = run_indices(batch.starts[samples], batch.starts.diff()[samples])
                logprobs, ids, top = dense[number]
                logprobs[tokens] = columns["teacher_logprobs"]
                given = torch.zeros_like(batch.loss_mask).index_fill(0, tokens, True)[batch.sampled.index]
                ids[given], top[given] = (columns[name].values.view(-1, self._k) for name in COLUMNS[1:])
        for batch, (logprobs, ids, top) in zip(batches, dense, strict=True):
            offsets = bounds_of(batch.loss_mask.long() * self._k)
            batch.teacher_logprobs = logprobs
            if self._settings.coef:
                batch.teacher_ids, batch.teacher_top = (Ragged(some.flatten(), offsets) for some in (ids, top))

    def add_to_advantages(self, batch: Batch) -> None:
        """Add each token's log-ratio of teacher to student to its advantage, or replace it with `teacher.only`.

        reward_coef (log teacher - log student) of the sampled token: in expectation, the gradient of the reverse KL at
        that token (Lu and Thinking Machines, On-Policy Distillation, 2025).
        """
        old = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
        more = (batch.teacher_logprobs - old).nan_to_num(0.0) * batch.loss_mask
        kept = torch.zeros_like(batch.advantages) if self._settings.only else batch.advantages
        batch.advantages = kept + self._settings.reward_coef * more

    def loss(self, inner: BoundLoss) -> BoundLoss:
        """Add the divergence from the teachers to a loss."""
        settings = self._settings

        # found: the student's logprobs of the teacher's most likely tokens, if the loss reads them, then the batch.
        def distilled(logprobs: Tensor, entropy: Tensor, *found: Tensor | Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            *among, batch = found
            loss, quantities = inner(logprobs, entropy, batch)
            gap = logprobs.detach() - batch.teacher_logprobs[batch.sampled.index]
            quantities = dict(quantities) | {"distill/reverse_kl": gap.nan_to_num(0.0)}
            for student in among:
                top = batch.teacher_top.index_select(0, batch.sampled.index).values.view(student.shape)
                divergence = distillation(settings.loss, top, student, settings.mix)
                loss = loss + settings.coef * divergence
                quantities["distill/loss"] = divergence.detach()
            return loss, quantities

        return distilled

    def _rows(self, plan: UpdatePlan, table: SampleTable) -> dict[str, np.ndarray]:
        numbers = table.domains[table.tickets.searchsorted(plan.keys[:, 0])]
        owners = np.array([name if name in self._teachers else "" for name in table.names], object)[numbers]
        return {domain: owners == domain for domain in sorted(self._teachers) if (owners == domain).any()}


def _nothing(batch: Batch, k: int) -> tuple[Tensor, Tensor, Tensor]:
    count = len(batch.sampled.index)
    logprobs = torch.full((batch.num_tokens,), torch.nan)
    return logprobs, torch.arange(k, dtype=torch.int32).repeat(count, 1), torch.full((count, k), -torch.inf)
