"""Frozen roles on ranks of their own (`placement.reference`, `placement.teacher`): those that train ask, those answer.

    roles = frozen.beside(built)     # [train] the policy's ranks ask through roles that have the policy's layout
    frozen.serve(own)                # [frozen] answer until the run is over

A question is a meeting of all ranks of the job: the leaders of the policy's data shards say which samples they have,
tokens travel to the data shards of the role, and the columns that it finds travel back, all to all. Between two of them
those that answer wait in a collective of the hosts, which may take for ever; a stall is that no rank moves at all.
"""

from collections.abc import Callable, Mapping, Sequence
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
from spmd_rl.learn.prepare import assign
from spmd_rl.learn.transfer import FROM_ROUTE, Route, leaders, send, transfer
from spmd_rl.model.size import ModelSize
from spmd_rl.train import Roles
from spmd_rl.train.base import PolicyRole

SEEN = (*FROM_ROUTE, "token_ids", "loss_mask", "rollout_logprobs", "lags", "candidate_ids", "experts")
"""Columns of a batch that a forward reads, or without which there is none"""
FOUND = {
    "logprobs": ("ref_logprobs", "ref_entropy"),
    "top_logprobs": ("teacher_logprobs", "teacher_ids", "teacher_top"),
}
"""Methods of a `PolicyRole` that may be asked, and the columns that they give"""


@dataclass(slots=True)
class AskedBatch(Batch):
    """What a frozen role is shown, and what it finds there."""

    ref_entropy: Tensor | None = field(default=None, metadata=per_token(torch.float32, "nats"))
    """float32 [T]: the entropy beside `ref_logprobs`"""


class RoleFacts(msgspec.Struct, array_like=True):
    """What all ranks must know of a role."""

    blocks: list[list[int]]
    """ranks of the job that hold each data shard"""
    hidden_size: int
    size: dict[str, int]
    """a `ModelSize`"""

    @classmethod
    def of(cls, role: PolicyRole) -> "RoleFacts":
        """Of a role that is built here."""
        data, ranks = role.layout.data, role.layout.world.ranks
        blocks = [[ranks[rank] for rank in data.ranks_of(shard)] for shard in range(data.size)]
        return cls(blocks, role.hidden_size, asdict(role.size))


class Question(msgspec.Struct, array_like=True):
    """What the leader of a data shard of the policy asks."""

    role: str = ""
    """'': nothing any more, the run is over"""
    method: str = ""
    args: list[float | int] = []
    step: int = 0
    columns: list[str] = []
    """that its batch has"""
    samples: list[list[int]] = []
    """(ticket, answer, unit, tokens of the prompt, all tokens)"""


class FrozenRoles:
    """How all ranks of a job meet over the roles that only some of them hold."""

    def __init__(self, world: World) -> None:
        """world: all ranks."""
        self._world = world
        self._facts: dict[str, RoleFacts] = {}

    def beside(self, built: Roles) -> Roles:
        """[all] With `serve`: `built`, and the roles of the other ranks as if the policy's ranks held them."""
        self._join({"policy": RoleFacts.of(built.policy)})  # [all]
        found = {
            name: RemoteRole(self, name, built.policy.layout, facts)
            for name, facts in self._facts.items()
            if name != "policy"
        }
        teachers = {name.partition(".")[2]: role for name, role in found.items() if name.startswith("teacher")}
        return built._replace(
            reference=found.get("reference", built.reference), teachers={**built.teachers, **teachers}
        )

    def serve(self, own: Mapping[str, PolicyRole]) -> None:
        """[all] With `beside`: compute what is asked of the roles of this rank until the run is over."""
        self._join({name: RoleFacts.of(role) for name, role in own.items()})  # [all]
        while self.meet(None, None, own) is not None:  # [all]
            pass
        for role in own.values():
            role.close()

    def finish(self) -> None:
        """[all] Let those that serve go."""
        self.meet(Question(), None)  # [all]

    def _join(self, facts: dict[str, RoleFacts]) -> None:
        for theirs in self._world.gather("start: frozen roles", facts, dict[str, RoleFacts]):  # [all]
            self._facts |= theirs

    def meet(
        self, question: Question | None, batch: Batch | None, own: Mapping[str, PolicyRole] | None = None
    ) -> dict[str, Any] | None:
        """[all] The columns that were found of this rank's samples, `batch`; None when the run is over.

        question: of a leader of the policy's data shards; None on all other ranks.
        """
        world = self._world
        asked = [one for one in world.gather("frozen: question", question, Question | None) if one]  # [all]
        first = asked[0]
        if not first.role:
            return None
        name, role = f"frozen: {first.role}", (own or {}).get(first.role)
        there, back = self._routes(first.role, asked)
        shown = _empty(first.columns) if batch is None else batch
        share = transfer(f"{name}: samples", shown, there, world, [first.method, first.args])  # [all]
        columns = FOUND[first.method]
        if role is None:
            share = _empty((*first.columns, *columns))
        else:
            if first.step != world.journal.step:
                world.journal.set_step(first.step)
            with world.phase("logprobs"), role.awake():
                values = getattr(role, first.method)(share, *first.args)  # [frozen]
            for column, value in zip(columns, values, strict=True):
                setattr(share, column, value)
        return send(f"{name}: found", share, columns, back, world)  # [all]

    def _routes(self, name: str, asked: Sequence[Question]) -> tuple[Route, Route]:
        """To the role's data shards, and back. Where there are as many of them, each answers one of the policy's."""
        facts, here = self._facts[name], DataShard(self._world, self._facts["policy"].blocks)
        there = DataShard(self._world, facts.blocks)
        rows = np.array([row for one in asked for row in one.samples], np.int64).reshape(-1, 5)
        shards = np.arange(here.size).repeat([len(one.samples) for one in asked])
        to = shards
        if here.size != there.size:
            to, order = np.zeros_like(shards), np.lexsort(rows[:, 2::-2].T)  # by ticket, then unit
            to[order] = assign(rows[order][:, (0, 2, 3, 4)], [0, len(rows)], there.size, facts.hidden_size)[0]
        keys, units, lengths = rows[:, :2], rows[:, 2], rows[:, 4]
        return (
            Route(keys, units, lengths, leaders(here)[shards], to, there),
            Route(keys, units, lengths, leaders(there)[to], shards, here),
        )


class RemoteRole:
    """A frozen `train.base.PolicyRole` on the ranks of the policy, which other ranks compute."""

    sync_steps: int | None = None
    """It stays as it is."""

    def __init__(self, frozen: FrozenRoles, name: str, layout: Layout, facts: RoleFacts) -> None:
        """layout: the policy's."""
        self._frozen, self._name = frozen, name
        self.layout, self.hidden_size, self.size = layout, facts.hidden_size, ModelSize(**facts.size)

    def awake(self) -> AbstractContextManager[None]:
        """See `Role`; nothing of it lies here."""
        return nullcontext()

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] See `PolicyRole`."""
        return self._ask("logprobs", batch, temperature)

    def top_logprobs(self, batch: Batch, temperature: float, k: int, num_ids: int) -> tuple[Tensor, Ragged, Ragged]:
        """[all] See `PolicyRole`."""
        return self._ask("top_logprobs", batch, temperature, k, num_ids)

    def close(self) -> None:
        """Nothing: see `FrozenRoles.finish`."""

    def _ask(self, method: str, batch: Batch, *args: float) -> tuple[Any, ...]:
        """[all] All ranks of a block hold the same batch, and its leader speaks for it."""
        shown = {name: value for name, _, value in batch.columns() if name in SEEN}
        question = None
        if self.layout.data.is_leader:
            step = self.layout.world.journal.step
            question = Question(self._name, method, list(args), step, list(shown), _samples(batch))
        found = self._frozen.meet(question, AskedBatch(batch.starts, **shown))  # [all]
        return tuple(found[column] for column in FOUND[method])


def _samples(batch: Batch) -> list[list[int]]:
    """`Question.samples`."""
    mask, bounds = batch.loss_mask.numpy(), batch.starts.tolist()
    prompts = [[int(mask[begin:end].argmax()), end - begin] for begin, end in pairwise(bounds)]
    rows = zip(batch.keys.tolist(), batch.units.tolist(), prompts, strict=True)
    return [[*key, unit, *lengths] for key, unit, lengths in rows]


def _empty(columns: Sequence[str]) -> AskedBatch:
    """No sample, of these columns."""
    none: Callable[..., Tensor] = torch.zeros
    known = {one.name: one.metadata["column"] for one in fields(AskedBatch) if "column" in one.metadata}
    made = {name: none(0, *known[name].shape, dtype=known[name].dtype) for name in columns}
    lists = {name: Ragged(made[name], none(1, dtype=torch.int64)) for name in columns if known[name].ragged}
    return AskedBatch(none(1, dtype=torch.int64), **(made | lists))
