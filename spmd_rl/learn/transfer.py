"""Packed samples move between ranks: to those that train them, to those of another role, and columns back.

    batch = transfer("prepare: samples", packed, route, world)                   # [all] whole samples
    columns = send("prepare: values", batch, ["values"], back, world)            # [all] some of their columns

A route says who sends which sample where; all ranks know it, so sizes need no message. Tensors of all columns of one
kind travel together in one all-to-all. No rank ever holds more than what it sends and what it receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.batch import Batch, Column, Entries, Ragged, bounds_of, positions, run_indices
from spmd_rl.distributed import DataShard, World

Columns = dict[str, tuple[Column, Entries]]


@dataclass(frozen=True, slots=True)
class Route:
    """Which rank sends which samples to which data shards: n rows, equal on all ranks."""

    keys: np.ndarray
    """int64 [n, 2]: (ticket, answer)"""
    units: np.ndarray
    """int64 [n]: see `Batch.units`"""
    lengths: np.ndarray
    """int64 [n]: tokens of the sample"""
    src_rank: np.ndarray
    """int64 [n]: rank that sends it"""
    data_rank: np.ndarray
    """int64 [n]: data shard that receives it, on every rank of its block"""
    data: DataShard
    """this rank's among the receiving shards"""

    def select(self, rows: np.ndarray) -> "Route":
        """Of these samples alone."""
        columns = (self.keys, self.units, self.lengths, self.src_rank, self.data_rank)
        return Route(*(column[rows] for column in columns), self.data)


def transfer(name: str, batch: Batch, route: Route, world: World, agreed: Any = None) -> Batch:
    """[all] The samples that the route gives this rank's data shard, in the route's order, with all their columns.

    batch: holds at least the samples that this rank sends; the same columns on all ranks. agreed: what else must be
    equal everywhere (see `World.exchange`). RunFailed, on all ranks alike, if it is not, or the routes differ.
    """
    names = [column for column, _, _ in batch.columns() if column not in ("keys", "units", "position_ids")]
    columns = send(name, batch, names, route, world, agreed)  # [all]
    rows = route.data_rank == route.data.rank
    starts = bounds_of(torch.from_numpy(route.lengths[rows]))
    keys, units = torch.from_numpy(route.keys[rows]), torch.from_numpy(route.units[rows])
    return type(batch)(starts=starts, keys=keys, units=units, position_ids=positions(starts), **columns)


def send(
    name: str, batch: Batch, names: Sequence[str], route: Route, world: World, agreed: Any = None
) -> dict[str, Entries]:
    """[all] The columns `names` of the samples that the route gives this rank's data shard, in the route's order."""
    copies = _Copies(route, world)
    numbers = {tuple(key): number for number, key in enumerate(batch.keys.tolist())}
    keys = map(tuple, route.keys[copies.sent].tolist())
    leaving = batch.select([numbers[key] for key in keys if key in numbers])  # all are, if the ranks agree
    present: Columns = {key: (column, value) for key, column, value in leaving.columns() if key in names}
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
    """The copies of samples that travel: one for each rank of the receiving block."""

    def __init__(self, route: Route, world: World) -> None:
        blocks = np.array([route.data.ranks_of(shard) for shard in range(route.data.size)], np.int64)
        to = blocks[route.data_rank]
        self._row, self._to = np.arange(len(to)).repeat(to.shape[1]), to.flatten()
        self._from, self._lengths = route.src_rank[self._row], route.lengths
        self.world = world
        leaving = np.flatnonzero(self._from == world.rank)
        self.sent = self._row[leaving[self._to[leaving].argsort(kind="stable")]]
        """rows of the route that this rank sends, by the rank that they go to"""
        coming = np.flatnonzero(self._to == world.rank)
        self.received = self._row[coming[self._from[coming].argsort(kind="stable")]]
        """rows of the route that this rank receives, by the rank that they come from"""

    def counts(self, sizes: np.ndarray) -> tuple[list[int], list[int]]:
        """Entries that go to and that come from each rank, of so many for each row of the route."""
        sizes, rank, size = sizes[self._row], self.world.rank, self.world.size
        leaving, coming = self._from == rank, self._to == rank
        sent = np.bincount(self._to[leaving], weights=sizes[leaving], minlength=size)
        received = np.bincount(self._from[coming], weights=sizes[coming], minlength=size)
        return sent.astype(np.int64).tolist(), received.astype(np.int64).tolist()

    def sent_to(self) -> np.ndarray:
        """The rank that each of `sent` goes to."""
        leaving = self._to[self._from == self.world.rank]
        return np.sort(leaving)

    def in_order(self, arrived: dict[str, Entries], columns: dict[str, Column]) -> dict[str, Entries]:
        """The columns of `received`, by row of the route."""
        order = self.received.argsort(kind="stable")
        if (order[1:] > order[:-1]).all():
            return arrived
        lengths, rows = torch.from_numpy(self._lengths[self.received]), torch.from_numpy(order)
        index = {"token": run_indices(bounds_of(lengths)[rows], lengths[rows]), "sample": rows}
        return {key: value.index_select(0, index[columns[key].per]) for key, value in arrived.items()}


def _send_ragged(name: str, column: Column, value: Ragged, sizes: Tensor, leaving: Batch, copies: _Copies) -> Ragged:
    """[all] A ragged column of `leaving`; `sizes` have come, and only the senders know how many values go where."""
    first = leaving.starts if column.per == "token" else torch.arange(leaving.num_samples + 1)
    per_copy = value.offsets[first].diff().numpy()
    mine = np.bincount(copies.sent_to(), weights=per_copy, minlength=copies.world.size).astype(np.int64)
    counts = np.array(copies.world.gather(f"{name}: sizes", mine.tolist()), np.int64)  # [all]
    values: Columns = {"values": (column, value.values)}
    received = counts[:, copies.world.rank].tolist()
    rows = copies.world.exchange(f"{name}: values", _to_bytes(values), mine.tolist(), received)  # [all]
    return Ragged(_from_bytes(rows, values)["values"], bounds_of(sizes))


def _width(column: Column) -> int:
    """Bytes of an entry."""
    return prod(column.shape) * column.dtype.itemsize


def _to_bytes(columns: Columns) -> Tensor:
    """The entries of tensors of one length N, side by side. uint8 [N, bytes]."""
    parts = [
        value.contiguous().reshape(len(value), prod(column.shape)).view(torch.uint8).reshape(len(value), _width(column))
        for column, value in columns.values()
    ]
    return torch.cat(parts, 1)


def _from_bytes(rows: Tensor, columns: Columns) -> dict[str, Tensor]:
    """The inverse."""
    parts = rows.split([_width(column) for column, _ in columns.values()], 1)
    return {
        key: part.clone(memory_format=torch.contiguous_format).flatten().view(column.dtype).reshape(-1, *column.shape)
        for (key, (column, _)), part in zip(columns.items(), parts, strict=True)
    }
