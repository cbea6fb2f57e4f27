"""Transfer of packed samples between ranks: to those that train them (`redistribute`), to those of another role, and
columns back (`transfer`, `send`).

All ranks know every sample's route, so sizes need no message. Columns of one kind share an all-to-all. The `Sample`
stays on its generator rank, for the sample log.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.batch import Batch, Column, Entries, Ragged, bounds_of, positions, run_indices
from spmd_rl.distributed import DataShard, World
from spmd_rl.learn.prepare import UpdatePlan
from spmd_rl.train.base import CriticRole, PolicyRole, Role

Columns = dict[str, tuple[Column, Entries]]
FROM_ROUTE = ("keys", "units", "position_ids")


@dataclass(frozen=True, slots=True)
class Route:
    """Source rank and destination data shard of n samples, equal on all ranks."""

    keys: np.ndarray
    """int64 [n, 2]: (ticket, answer)"""
    units: np.ndarray
    """int64 [n]: see `Batch.units`"""
    lengths: np.ndarray
    """int64 [n]: tokens"""
    src_rank: np.ndarray
    """int64 [n]: sending rank"""
    data_rank: np.ndarray
    """int64 [n]: receiving data shard: all its ranks (`pp` x `cp` x `tp`)"""
    data: DataShard
    """this rank's data shard among the receivers"""

    @classmethod
    def of(cls, plan: UpdatePlan, data: DataShard) -> "Route":
        """Return the route of a plan's samples from generator ranks to data shards."""
        return cls(
            keys=plan.keys,
            units=plan.units,
            lengths=plan.lengths,
            src_rank=plan.src_rank,
            data_rank=plan.data_rank,
            data=data,
        )

    def select(self, rows: np.ndarray) -> "Route":
        """Return the route of the samples in `rows`."""
        return Route(
            keys=self.keys[rows],
            units=self.units[rows],
            lengths=self.lengths[rows],
            src_rank=self.src_rank[rows],
            data_rank=self.data_rank[rows],
            data=self.data,
        )


def transfer(name: str, batch: Batch, route: Route, world: World, agreed: Any = None) -> Batch:
    """[all] Return the samples routed to this rank's data shard, in order, with all columns.

    batch: includes the samples that this rank sends; the same columns on all ranks. agreed: further data that must be
    equal on all ranks (see `World.exchange`). RunFailed, on all ranks, if it or the routes differ.
    """
    columns = send(name, batch, None, route, world, agreed)  # [all]
    rows = route.data_rank == route.data.rank
    starts = bounds_of(torch.from_numpy(route.lengths[rows]))
    keys, units = torch.from_numpy(route.keys[rows]), torch.from_numpy(route.units[rows])
    return type(batch)(starts=starts, keys=keys, units=units, position_ids=positions(starts), **columns)


def send(
    name: str, batch: Batch, names: Sequence[str] | None, route: Route, world: World, agreed: Any = None
) -> dict[str, Entries]:
    """[all] Return the columns `names` of the samples routed to this rank's data shard, in order. None: all but those
    that follow from the route.
    """
    copies = _Copies(route, world)
    numbers = {tuple(key): number for number, key in enumerate(batch.keys.tolist())}
    keys = map(tuple, route.keys[copies.sent].tolist())
    # All samples are present if the ranks agree on the plan.
    leaving = batch.select([numbers[key] for key in keys if key in numbers])
    present: Columns = {
        key: (column, value)
        for key, column, value in leaving.columns()
        if (key not in FROM_ROUTE if names is None else key in names)
    }
    ragged = {key: pair for key, pair in present.items() if pair[0].ragged}
    tensors: Columns = {key: pair for key, pair in present.items() if key not in ragged}
    for key, (column, value) in ragged.items():
        assert isinstance(value, Ragged)
        tensors[f"{key}: sizes"] = Column(column.per, torch.int64), value.offsets.diff()
    arrived: dict[str, Entries] = {}
    for per in ("token", "sample"):
        some = {key: pair for key, pair in tensors.items() if pair[0].per == per}
        if some:
            sizes = route.lengths if per == "token" else np.ones_like(route.lengths)
            plan = [agreed, route.src_rank, route.data_rank, sizes]
            rows = world.exchange(name, _to_bytes(some), *copies.counts(sizes), plan)  # [all]
            arrived |= _from_bytes(rows, some)
    assert np.array_equal(leaving.starts.diff().numpy(), route.lengths[copies.sent]), "samples of other lengths"
    for key, (column, value) in ragged.items():
        arrived[key] = _send_ragged(name, column, value, arrived.pop(f"{key}: sizes"), leaving, copies)  # [all]
    return copies.in_order(arrived, {key: column for key, (column, _) in present.items()})


class _Copies:
    """Copies of samples to send, one per rank of the receiving shard."""

    def __init__(self, route: Route, world: World) -> None:
        blocks = np.array([route.data.ranks_of(shard) for shard in range(route.data.size)], np.int64)
        to = blocks[route.data_rank]
        self._row, self._to = np.arange(len(to)).repeat(to.shape[1]), to.flatten()
        self._from, self._lengths = route.src_rank[self._row], route.lengths
        self.world = world
        # Stable sorts on both sides: sender and receiver then agree on the order without a message.
        leaving = np.flatnonzero(self._from == world.rank)
        self.sent = self._row[leaving[self._to[leaving].argsort(kind="stable")]]
        """rows of the route to send, by destination"""
        coming = np.flatnonzero(self._to == world.rank)
        self.received = self._row[coming[self._from[coming].argsort(kind="stable")]]
        """rows of the route to receive, by source"""

    def counts(self, sizes: np.ndarray) -> tuple[list[int], list[int]]:
        """Return the entries to and from each rank. sizes: entries of each row of the route."""
        sizes, rank, size = sizes[self._row], self.world.rank, self.world.size
        leaving, coming = self._from == rank, self._to == rank
        sent = np.bincount(self._to[leaving], weights=sizes[leaving], minlength=size)
        received = np.bincount(self._from[coming], weights=sizes[coming], minlength=size)
        return sent.astype(np.int64).tolist(), received.astype(np.int64).tolist()

    def sent_to(self) -> np.ndarray:
        leaving = self._to[self._from == self.world.rank]
        return np.sort(leaving)

    def in_order(self, arrived: dict[str, Entries], columns: dict[str, Column]) -> dict[str, Entries]:
        order = self.received.argsort(kind="stable")
        # Rows often arrive in order already: save the copy of all columns.
        if (order[1:] > order[:-1]).all():
            return arrived
        lengths, rows = torch.from_numpy(self._lengths[self.received]), torch.from_numpy(order)
        index = {"token": run_indices(bounds_of(lengths)[rows], lengths[rows]), "sample": rows}
        return {key: value.index_select(0, index[columns[key].per]) for key, value in arrived.items()}


def _send_ragged(name: str, column: Column, value: Ragged, sizes: Tensor, leaving: Batch, copies: _Copies) -> Ragged:
    """[all] Send a ragged column of `leaving`. sizes: values per entry at the receiver."""
    first = leaving.starts if column.per == "token" else torch.arange(leaving.num_samples + 1)
    per_copy = value.offsets[first].diff().numpy()
    mine = np.bincount(copies.sent_to(), weights=per_copy, minlength=copies.world.size).astype(np.int64)
    counts = np.array(copies.world.gather(f"{name}: sizes", mine.tolist()), np.int64)  # [all]
    values: Columns = {"values": (column, value.values)}
    received = counts[:, copies.world.rank].tolist()
    rows = copies.world.exchange(f"{name}: values", _to_bytes(values), mine.tolist(), received)  # [all]
    return Ragged(_from_bytes(rows, values)["values"], bounds_of(sizes))


def _width(column: Column) -> int:
    return prod(column.shape) * column.dtype.itemsize


def _to_bytes(columns: Columns) -> Tensor:
    """Return tensors of one length N side by side, uint8 [N, bytes]."""
    parts = [
        value.contiguous().reshape(len(value), prod(column.shape)).view(torch.uint8).reshape(len(value), _width(column))
        for column, value in columns.values()
    ]
    return torch.cat(parts, 1)


def _from_bytes(rows: Tensor, columns: Columns) -> dict[str, Tensor]:
    parts = rows.split([_width(column) for column, _ in columns.values()], 1)
    return {
        # A copy, because a view of bytes at an odd offset cannot be reinterpreted as a wider dtype.
        key: part.clone(memory_format=torch.contiguous_format).flatten().view(column.dtype).reshape(-1, *column.shape)
        for (key, (column, _)), part in zip(columns.items(), parts, strict=True)
    }


def redistribute(packed: Batch, plan: UpdatePlan, num_updates: int, data: DataShard, world: World) -> list[Batch]:
    """[all] Return the samples of this rank's data shard, one packed batch per optimizer step; any may be empty.

    packed: this rank's samples (`UpdatePlan.samples_of`). data: its data shard. RunFailed, on all ranks, unless their
    plans are equal.
    """
    # Every rank has these numbers in the plan, so they need no transfer.
    packed.advantages = packed.weights = None
    with world.phase("coordination"):
        batch = transfer("prepare: samples", packed, Route.of(plan, data), world, plan.columns())  # [all]
    mine = plan.data_rank == data.rank
    batch.weights = _at_sampled(plan.weights[mine].astype(np.float32), plan.num_sampled[mine], batch)
    # The plan is equal on all ranks, so all batches get the column or none.
    if plan.right.any():
        batch.right = _at_sampled(plan.right[mine].astype(np.float32), plan.num_sampled[mine], batch)
    # Some answer has several turns or segments. All ranks know it alike, so all batches get these columns or none.
    if len(plan.turns) != plan.num_answers:
        spans = mine.repeat(plan.num_spans)
        batch.turns = _at_sampled(plan.turns[spans], plan.span_lengths[spans], batch)
        batch.trajectories = torch.from_numpy(plan.trajectories[mine])
    batches = [batch]
    if num_updates > 1:
        numbers = plan.minibatches[mine]
        batches = [batch.select(np.flatnonzero(numbers == number)) for number in range(num_updates)]
    give_advantages(batches, plan, data)
    return batches


def give_advantages(batches: Sequence[Batch], plan: UpdatePlan, data: DataShard) -> None:
    """Set the advantages of this rank's mini-batches."""
    for number, batch in enumerate(batches):
        spans = ((plan.data_rank == data.rank) & (plan.minibatches == number)).repeat(plan.num_spans)
        batch.advantages = _at_sampled(plan.advantages[spans].astype(np.float32), plan.span_lengths[spans], batch)


def _at_sampled(values: np.ndarray, lengths: np.ndarray, batch: Batch) -> Tensor:
    """Return each span's value at its sampled tokens, 0 elsewhere. [T]"""
    at_sampled = torch.from_numpy(values.repeat(lengths))
    return torch.zeros(batch.num_tokens, dtype=at_sampled.dtype).masked_scatter(batch.loss_mask, at_sampled)


def fill_in(
    batches: Sequence[Batch],
    plan: UpdatePlan,
    policy: PolicyRole,
    reference: PolicyRole | None,
    critic: CriticRole | None,
    *,
    needs_old: bool,
    temperature: float,
    world: World,
) -> None:
    """[all] Set `ref_logprobs` with a reference, `values` with a critic, and `old_logprobs` if needed, in this rank's
    mini-batches.
    """

    def logprobs_of(role: PolicyRole, column: str) -> Callable[[Batch], dict[str, Tensor]]:
        return lambda batch: {column: role.logprobs(batch, temperature)[0]}

    columns: list[tuple[str, Role, Callable[[Batch], dict[str, Tensor]]]] = []
    if needs_old:
        columns.append(("old_logprobs", policy, logprobs_of(policy, "old_logprobs")))
    if reference:
        columns.append(("ref_logprobs", reference, logprobs_of(reference, "ref_logprobs")))
    if critic:
        columns.append(("values", critic, lambda batch: {"values": critic.values(batch)}))
    for what, role, compute in columns:
        with role.awake():
            RoleShards(policy, role, plan, world).fill_in(what, batches, compute)  # [all]


class RoleShards:
    """Transfer of mini-batches between the policy's data shards and a role's; no-op if they are the same."""

    def __init__(
        self, policy: Role, role: Role, plan: UpdatePlan, world: World, rows: np.ndarray | None = None
    ) -> None:
        """rows: bool [n], the plan's samples for the role; default: all."""
        here, there = policy.layout.data, role.layout.data
        self._same, self._minibatches, self._world = _ranks(here) == _ranks(there), plan.minibatches, world
        self._rows, self._mine = rows, plan.data_rank == here.rank
        if not self._same:
            # Every rank of a shard has the batch, and its leader sends.
            other = plan.elsewhere(there, role.hidden_size)
            self._there = replace(Route.of(other, there), src_rank=leaders(here)[plan.data_rank])
            self._back = replace(Route.of(plan, here), src_rank=leaders(there)[other.data_rank])

    def share(self, name: str, batches: Sequence[Batch]) -> list[Batch]:
        """[all] Return the role's share of each of the policy's mini-batches."""
        if self._same:
            return [batch if self._rows is None else batch.select(self.places(n)) for n, batch in enumerate(batches)]
        return [
            transfer(name, batch, self._there.select(self._of(number)), self._world)  # [all]
            for number, batch in enumerate(batches)
        ]

    def places(self, number: int) -> np.ndarray:
        """Return the indices of the role's samples in this rank's mini-batch `number`: int64 [m]."""
        inside = self._mine & (self._minibatches == number)
        return np.flatnonzero(self._of(number)[inside])

    def _of(self, number: int) -> np.ndarray:
        inside = self._minibatches == number
        return inside if self._rows is None else inside & self._rows

    def back(self, name: str, shares: Sequence[Batch], columns: Sequence[str]) -> list[dict[str, Entries]]:
        """[all] Send these columns of the role's shares to the policy's ranks."""
        if self._same:
            return [{column: getattr(share, column) for column in columns} for share in shares]
        routes = [self._back.select(self._of(number)) for number in range(len(shares))]
        return [send(name, share, columns, r, self._world) for share, r in zip(shares, routes, strict=True)]  # [all]

    def fill_in(self, what: str, batches: Sequence[Batch], compute: Callable[[Batch], dict[str, Tensor]]) -> None:
        """[all] Set the per-token columns, float32 [T], that the role computes."""
        name, columns = f"prepare: {what}", dict[str, Tensor]()
        shares = self.share(name, batches)  # [all]
        for share in shares:
            columns = compute(share)  # [all]
            for column, values in columns.items():
                setattr(share, column, values)
        for batch, found in zip(batches, self.back(name, shares, list(columns)), strict=True):  # [all]
            for column in columns:
                setattr(batch, column, found[column])


def _ranks(data: DataShard) -> list[tuple[int, ...]]:
    return [data.ranks_of(shard) for shard in range(data.size)]


def leaders(data: DataShard) -> np.ndarray:
    """Return each shard's first rank, which sends for it: int64 [shards]."""
    return np.array([ranks[0] for ranks in _ranks(data)], np.int64)
