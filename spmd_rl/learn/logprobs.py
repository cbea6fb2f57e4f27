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
from spmd_rl.learn.transfer import Route, send, transfer
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
            RoleShards(policy, role, world).fill_in(column, batches, plan, compute)  # [all]


class RoleShards:
    """The way of mini-batches between the policy's data shards and a role's; none where they are the same."""

    def __init__(self, policy: Role, role: Role, world: World) -> None:
        self._policy, self._role, self._world = policy.layout.data, role.layout.data, world
        self._same, self._hidden_size = _ranks(self._policy) == _ranks(self._role), role.hidden_size

    def share(self, name: str, batches: Sequence[Batch], plan: Plan) -> list[Batch]:
        """[all] The role's share of each mini-batch, with all columns; the batches are the policy's."""
        if self._same:
            return list(batches)
        routes = self._routes(plan, len(batches), back=False)
        return [transfer(name, b, r, self._world) for b, r in zip(batches, routes, strict=True)]  # [all]

    def fill_in(self, column: str, batches: Sequence[Batch], plan: Plan, compute: Callable[[Batch], Tensor]) -> None:
        """[all] Set a per-token column, float32 [T], that the role computes for its share of each mini-batch."""
        name = f"prepare: {column}"
        shares = self.share(name, batches, plan)  # [all]
        for share in shares:
            setattr(share, column, compute(share))  # [all]
        if not self._same:
            routes = self._routes(plan, len(batches), back=True)
            for batch, share, route in zip(batches, shares, routes, strict=True):
                setattr(batch, column, send(name, share, [column], route, self._world)[column])  # [all]

    def _routes(self, plan: Plan, num_updates: int, back: bool) -> list[Route]:
        """Of each mini-batch, between the leaders of one side's blocks and all ranks of the other's."""
        there = plan.elsewhere(self._role, num_updates, self._hidden_size)
        sender, receiver = (there, plan) if back else (plan, there)
        src, dst = (self._role, self._policy) if back else (self._policy, self._role)
        leaders = np.array([src.ranks_of(shard)[0] for shard in range(src.size)], np.int64)
        route = replace(receiver.route(dst), src_rank=leaders[sender.data_rank])
        return [route.select(np.flatnonzero(plan.minibatches == number)) for number in range(num_updates)]


def _ranks(data: DataShard) -> list[tuple[int, ...]]:
    return [data.ranks_of(shard) for shard in range(data.size)]
