"""Per-token columns that a model computes before the update: old and reference logprobs, and the critic's values.

A role may hold other data shards than the policy. Then its samples move to them, and only the column comes back.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.distributed import DataShard, World
from spmd_rl.learn.prepare import Plan
from spmd_rl.learn.transfer import send, transfer
from spmd_rl.train.base import CriticBackend, Role, TrainBackend


def fill_in(
    batches: Sequence[Batch],
    plan: Plan,
    policy: TrainBackend,
    reference: TrainBackend | None,
    critic: CriticBackend | None,
    *,
    needs_old: bool,
    temperature: float,
    world: World,
) -> None:
    """[all] Set `ref_logprobs` and `values` where there is a reference or a critic, and `old_logprobs` if needed.

    batches: this rank's mini-batches. temperature: logits are divided by it.
    """

    def logprobs_of(role: TrainBackend) -> Callable[[Batch], Tensor]:
        return lambda batch: role.logprobs(batch, temperature)[0]

    columns: list[tuple[str, Role, Callable[[Batch], Tensor]]] = []
    if needs_old:
        columns.append(("old_logprobs", policy, logprobs_of(policy)))
    if reference:
        columns.append(("ref_logprobs", reference, logprobs_of(reference)))
    if critic:
        columns.append(("values", critic, critic.values))
    for column, role, compute in columns:
        with role.awake():
            RoleShards(policy, role, plan, world).fill_in(column, batches, compute)  # [all]


class RoleShards:
    """The way of mini-batches between the policy's data shards and a role's; none where they are the same."""

    def __init__(self, policy: Role, role: Role, plan: Plan, world: World) -> None:
        here, there = policy.layout.data, role.layout.data
        self._same, self._minibatches, self._world = _ranks(here) == _ranks(there), plan.minibatches, world
        if not self._same:
            other = plan.elsewhere(there, role.hidden_size)
            self._there = replace(other.route(there), src_rank=_leaders(here)[plan.data_rank])
            self._back = replace(plan.route(here), src_rank=_leaders(there)[other.data_rank])

    def share(self, name: str, batches: Sequence[Batch]) -> list[Batch]:
        """[all] The role's share of each mini-batch, with all columns; the batches are the policy's."""
        if self._same:
            return list(batches)
        return [
            transfer(name, batch, self._there.select(self._minibatches == number), self._world)  # [all]
            for number, batch in enumerate(batches)
        ]

    def fill_in(self, column: str, batches: Sequence[Batch], compute: Callable[[Batch], Tensor]) -> None:
        """[all] Set a per-token column, float32 [T], that the role computes for its share of each mini-batch."""
        name = f"prepare: {column}"
        shares = self.share(name, batches)  # [all]
        for share in shares:
            setattr(share, column, compute(share))  # [all]
        if self._same:
            return
        for number, (batch, share) in enumerate(zip(batches, shares, strict=True)):
            route = self._back.select(self._minibatches == number)
            setattr(batch, column, send(name, share, [column], route, self._world)[column])  # [all]


def _ranks(data: DataShard) -> list[tuple[int, ...]]:
    """Of each shard."""
    return [data.ranks_of(shard) for shard in range(data.size)]


def _leaders(data: DataShard) -> np.ndarray:
    """The rank that counts for each shard, int64 [shards]."""
    return np.array([ranks[0] for ranks in _ranks(data)], np.int64)
