"""Collectives of bytes in host memory, through one rank of each node."""

# A flat all-gather of n ranks is a ring of n - 1 messages, one after the other, most of them between neighbours of one
# node, and n * n connections. Here a node's ranks meet in shared memory, and only one rank of each node is connected.

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class HostGroups:
    """Groups of one world: this node's ranks, first ranks of nodes."""

    rank: int
    # Indices of the ranks of each node.
    blocks: tuple[tuple[int, ...], ...]
    # None on a rank that is alone on its node.
    near: dist.ProcessGroup | None = None
    # None with one node, and on ranks that are not the first of theirs.
    leaders: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.blocks))

    def gather(self, payload: bytes, length: int) -> list[bytes]:
        """[all] Return each rank's payload, padded to `length` bytes."""
        mine = torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8)
        rows = _all_gather(self.near, mine)[None]
        if len(self.blocks) > 1:
            ours = rows[0]
            # Each node sends as many rows as the one with most ranks.
            rows = torch.zeros(len(self.blocks), max(map(len, self.blocks)), length, dtype=torch.uint8)
            if self.leaders:
                own = torch.zeros_like(rows[0])
                own[: len(ours)] = ours
                rows = _all_gather(self.leaders, own)
            if self.near:
                dist.broadcast(rows, group=self.near, group_src=0)
        return [row.tobytes() for row in rows.numpy()[*self._places]]

    def broadcast(self, payload: bytes, length: int, src: int) -> bytes:
        """[all] Return the payload, `length` bytes, of rank `src`."""
        data = torch.frombuffer(bytearray(payload if self.rank == src else length), dtype=torch.uint8)
        nodes, places = self._places
        is_near = nodes[self.rank] == nodes[src]
        if self.near and is_near:
            dist.broadcast(data, group=self.near, group_src=int(places[src]))
        if self.leaders:
            dist.broadcast(data, group=self.leaders, group_src=int(nodes[src]))
        if self.near and not is_near:
            dist.broadcast(data, group=self.near, group_src=0)
        return data.numpy().tobytes()

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """[all] Exchange rows, see `World.exchange`."""
        if len(self.blocks) == 1:
            return _exchange(self.near, rows, sent, received)
        # By way of the first ranks of both nodes: to the own one, between those, and to the receiver.
        mine = torch.from_numpy(np.array([sent, received], np.int64))
        counts = _all_gather(self.near, mine).numpy()  # [ranks of the node, 2, all ranks]
        rest = [0] * (len(counts) - 1)
        is_first = self.near is None or self.near.rank() == 0
        coming, going = counts.sum(2).T.tolist() if is_first else [[0, *rest]] * 2
        rows = _exchange(self.near, rows, [len(rows), *rest], coming)
        if self.leaders:
            rows = self._between_nodes(self.leaders, rows, counts)
        return _exchange(self.near, rows, going, [sum(received), *rest])

    def _between_nodes(self, leaders: dist.ProcessGroup, rows: Tensor, counts: np.ndarray) -> Tensor:
        """[leaders] Exchange rows of nodes."""
        # In: rows of this node, by source and destination; out: rows for it, by destination and source.
        node, place = self._places
        # A part has the rows from one rank to another one. Parts travel by node, destination and source.
        source, to = np.nonzero(counts[:, 0])
        rows = _in_order(rows, counts[source, 0, to], np.lexsort((source, place[to], node[to])))
        sent = np.bincount(node[to], counts[source, 0, to], len(self.blocks)).astype(int).tolist()
        target, origin = np.nonzero(counts[:, 1])
        order = np.lexsort((place[origin], target, node[origin]))
        sizes = counts[target, 1, origin]
        received = np.bincount(node[origin], sizes, len(self.blocks)).astype(int).tolist()
        # Only nodes with rows for each other meet: a step has few such pairs, and an all-to-all connects all of them.
        me, arrived = leaders.rank(), rows.new_empty(sum(received), rows.shape[1])
        into, out = arrived.split(received), rows.split(sent)
        into[me].copy_(out[me])
        works = [dist.irecv(part, group=leaders, group_src=n) for n, part in enumerate(into) if n != me and len(part)]
        works += [dist.isend(part, group=leaders, group_dst=n) for n, part in enumerate(out) if n != me and len(part)]
        for work in works:
            work.wait()
        return _in_order(arrived, sizes[order], order.argsort())

    @cached_property
    def _places(self) -> np.ndarray:
        # int64 [2, ranks]: node of each rank, and its place there.
        found = ((rank, node, place) for node, block in enumerate(self.blocks) for place, rank in enumerate(block))
        return np.array(sorted(found)).T[1:]


def _in_order(rows: Tensor, sizes: np.ndarray, order: np.ndarray) -> Tensor:
    parts = rows.split(sizes.tolist())
    return torch.cat([parts[place] for place in order]) if len(parts) > 1 else rows


def _exchange(group: dist.ProcessGroup | None, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    if group is None:
        return rows
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows, [*received], [*sent], group=group)
    return arrived


def _all_gather(group: dist.ProcessGroup | None, mine: Tensor) -> Tensor:
    if group is None:
        return mine[None]
    everyone = mine.new_empty(group.size(), *mine.shape)
    dist.all_gather(list(everyone), mine, group=group)
    return everyone
