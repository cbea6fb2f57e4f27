"""Frozen roles on separate ranks (`placement.reference`, `placement.teacher`) that compute for the trainer ranks.

Every request is a collective of all ranks of the job: leaders of the policy's data shards name their samples, the
tokens go to the role's data shards, and the computed columns come back. Between requests the role's ranks wait without
a limit; the watchdog sees other ranks' progress.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from spmd_rl.batch import Batch, Ragged, per_token
from spmd_rl.distributed import DataShard, Layout, World
from spmd_rl.learn.balance import assign
from spmd_rl.learn.transfer import FROM_ROUTE, Route, leaders, send, transfer
from spmd_rl.model.size import ModelSize
from spmd_rl.train import Roles
from spmd_rl.train.base import PolicyRole

SEEN = (*FROM_ROUTE, "token_ids", "loss_mask", "rollout_logprobs", "lags")
SEEN += ("candidate_ids", "pictures", "picture_sizes")
FOUND = {
    "logprobs": ("ref_logprobs", "ref_entropy"),
    "top_logprobs": ("teacher_logprobs", "teacher_ids", "teacher_top"),
}
"""Methods of a `PolicyRole` that can be requested, and their columns"""
Facts = tuple[list[list[int]], int, dict[str, int]]
"""(ranks of each data shard, `hidden_size`, `ModelSize`) of a role."""


@dataclass(slots=True)
class FrozenBatch(Batch):
    """Inputs and outputs of a frozen role."""

    ref_entropy: Tensor | None = field(default=None, metadata=per_token(torch.float32, "nats"))
    """float32 [T]"""


class LogprobRequest(msgspec.Struct, array_like=True):
    """Request of the leader of a policy data shard; without a role, the end of the run."""

    role: str = ""
    method: str = ""
    args: list[float | int] = []
    step: int = 0
    columns: list[str] = []
    samples: list[list[int]] = []
    """rows (ticket, unit, tokens of the prompt, all tokens, answer)"""


class FrozenRoles:
    """Rendezvous of all ranks of a job over the roles that only some of them hold."""

    def __init__(self, world: World, kinds: Collection[str]) -> None:
        """world: the ranks that train or hold these roles. kinds: `RoleConfig.kind` of the roles."""
        self._world, self.kinds = world, kinds
        self._facts: dict[str, Facts] = {}
        self._own: Mapping[str, PolicyRole] = {}

    def beside(self, built: Roles) -> Roles:
        """[all] Add proxies of roles on other ranks, which call `serve`, to the roles `built`."""
        self._join({"policy": built.policy})  # [all]
        layout = built.policy.layout
        found = {name: RemoteRole(self, name, layout, facts) for name, facts in self._facts.items() if name != "policy"}
        reference = found.pop("reference", built.reference)
        teachers = {name.partition(".")[2]: role for name, role in found.items()}
        return built._replace(reference=reference, teachers={**built.teachers, **teachers})

    def serve(self, own: Mapping[str, PolicyRole]) -> None:
        """[all] Pairs with `beside`: answer requests until the run is over."""
        self._join(own)  # [all]
        while self.meet(None, None):  # [all]
            pass

    def finish(self) -> None:
        """[all] End `serve` on the other ranks."""
        self.meet(LogprobRequest(), None)  # [all]

    def _join(self, own: Mapping[str, PolicyRole]) -> None:
        self._own, facts = own, {}
        for name, role in own.items():
            data, ranks = role.layout.data, role.layout.world.ranks
            places = [self._world.ranks.index(rank) for rank in ranks]
            blocks = [[places[rank] for rank in data.ranks_of(shard)] for shard in range(data.size)]
            facts[name] = blocks, role.hidden_size, asdict(role.size)
        for theirs in self._world.gather("start: frozen roles", facts, dict[str, Facts]):  # [all]
            self._facts |= theirs

    def meet(self, request: LogprobRequest | None, batch: Batch | None) -> dict[str, Any]:
        """[all] Return the columns computed for `batch`; empty when the run is over. request: of a leader of the
        policy's data shards.
        """
        world = self._world
        requests = [one for one in world.gather("frozen: request", request, LogprobRequest | None) if one]  # [all]
        first = requests[0]
        if not first.role:
            return {}
        name, columns, role = f"frozen: {first.role}", FOUND[first.method], self._own.get(first.role)
        there, back = self._routes(first.role, requests)
        shown = _empty(first.columns) if batch is None else batch
        share = transfer(f"{name}: samples", shown, there, world, [first.method, first.args])  # [all]
        if role is None:
            share = _empty([*first.columns, *columns])
        else:
            if first.step != world.journal.step:
                world.journal.set_step(first.step)
            with world.phase("logprobs"), role.awake():
                values = getattr(role, first.method)(share, *first.args)  # [frozen]
            for column, value in zip(columns, values, strict=True):
                setattr(share, column, value)
        return send(f"{name}: found", share, columns, back, world)  # [all]

    def _routes(self, name: str, requests: Sequence[LogprobRequest]) -> tuple[Route, Route]:
        here, there = (DataShard(self._world, self._facts[one][0]) for one in ("policy", name))
        rows = np.array([row for one in requests for row in one.samples], np.int64).reshape(-1, 5)
        shards = to = np.arange(here.size).repeat([len(one.samples) for one in requests])
        # With equal counts, shard i serves shard i.
        if here.size != there.size:
            to, order = np.zeros_like(shards), np.lexsort((rows[:, 1], rows[:, 0]))
            to[order] = assign(rows[order, :4], [0, len(rows)], there.size, self._facts[name][1])[0]
        sample = rows[:, (0, 4)], rows[:, 1], rows[:, 3]
        return Route(*sample, leaders(here)[shards], to, there), Route(*sample, leaders(there)[to], shards, here)


class RemoteRole:
    """Proxy on the policy's ranks for a frozen `train.base.PolicyRole` that other ranks compute."""

    sync_steps: int | None = None
    sees = True

    def __init__(self, frozen: FrozenRoles, name: str, layout: Layout, facts: Facts) -> None:
        self._frozen, self._name, self.layout = frozen, name, layout
        self.hidden_size, self.size = facts[1], ModelSize(**facts[2])

    def awake(self) -> AbstractContextManager[None]:
        """Return a no-op context: no weights are here."""
        return nullcontext()

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] Compute `PolicyRole.logprobs` on the role's ranks."""
        return self._request("logprobs", batch, temperature)

    def top_logprobs(self, batch: Batch, temperature: float, k: int, num_ids: int) -> tuple[Tensor, Ragged, Ragged]:
        """[all] Compute `PolicyRole.top_logprobs` on the role's ranks."""
        return self._request("top_logprobs", batch, temperature, k, num_ids)

    def _request(self, method: str, batch: Batch, *args: float) -> tuple[Any, ...]:
        """[all] Send one request per data shard, from its leader."""
        shown = {name: value for name, _, value in batch.columns() if name in SEEN}
        step, request = self.layout.world.journal.step, None
        if self.layout.data.is_leader:
            request = LogprobRequest(self._name, method, list(args), step, list(shown), _samples(batch))
        found = self._frozen.meet(request, FrozenBatch(batch.starts, **shown))  # [all]
        return tuple(found[column] for column in FOUND[method])


def _samples(batch: Batch) -> list[list[int]]:
    mask, bounds = batch.loss_mask.numpy(), pairwise(batch.starts.tolist())
    rows = zip(batch.keys.tolist(), batch.units.tolist(), bounds, strict=True)
    return [[ticket, unit, int(mask[a:b].argmax()), b - a, answer] for (ticket, answer), unit, (a, b) in rows]


def _empty(names: Sequence[str]) -> FrozenBatch:
    known = {one.name: one.metadata["column"] for one in fields(FrozenBatch)[1:]}
    made = {name: torch.empty(0, *known[name].shape, dtype=known[name].dtype) for name in names}
    zero = torch.zeros(1, dtype=torch.int64)
    return FrozenBatch(zero, **{name: Ragged(one, zero) if known[name].ragged else one for name, one in made.items()})
