"""Collectives of bytes in host memory, through one rank of each node."""

# A flat all-gather of n ranks is a ring of n - 1 messages, one after the other, most of them between neighbours of one
# node. Here a node's ranks meet in shared memory, and the ring has one rank of each node.

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.distributed import shared_group


@dataclass(frozen=True, slots=True)
class HostGroups:
    """Groups of one world: of all ranks, this node's ranks, first ranks of nodes."""

    whole: dist.ProcessGroup
    # Indices of the ranks of each node; empty if one group is enough.
    blocks: tuple[tuple[int, ...], ...] = ()
    near: dist.ProcessGroup | None = None
    leaders: dist.ProcessGroup | None = None

    def gather(self, payload: bytes, length: int) -> list[bytes]:
        """[all] Return each rank's payload, padded to `length` bytes."""
        mine = torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8)
        if not self.blocks:
            return [row.tobytes() for row in _all_gather(self.whole, mine).numpy()]
        # Each node sends as many rows as the one with most ranks.
        rows = torch.zeros(len(self.blocks), max(map(len, self.blocks)), length, dtype=torch.uint8)
        ours = _all_gather(self.near, mine) if self.near else mine[None]
        if self.leaders:
            own = torch.zeros_like(rows[0])
            own[: len(ours)] = ours
            rows = _all_gather(self.leaders, own)
        if self.near:
            dist.broadcast(rows, group=self.near, group_src=0)
        places = {rank: (node, place) for node, block in enumerate(self.blocks) for place, rank in enumerate(block)}
        found = rows.numpy()
        return [found[places[rank]].tobytes() for rank in range(len(places))]

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """[all] Exchange rows, see `World.exchange`."""
        group, arrived = self.whole, rows.new_empty(sum(received), rows.shape[1])
        if dist.get_backend(group) == shared_group.NAME:
            dist.all_to_all_single(arrived, rows, received, sent, group=group)
            return arrived
        # Only ranks with rows for each other meet: a step has few such pairs, and an all-to-all connects all of them.
        me, coming, going = group.rank(), arrived.split(received), rows.split(sent)
        coming[me].copy_(going[me])
        works = [dist.irecv(part, group=group, group_src=r) for r, part in enumerate(coming) if r != me and len(part)]
        works += [dist.isend(part, group=group, group_dst=r) for r, part in enumerate(going) if r != me and len(part)]
        for work in works:
            work.wait()
        return arrived


def _all_gather(group: dist.ProcessGroup, mine: Tensor) -> Tensor:
    everyone = mine.new_empty(group.size(), *mine.shape)
    dist.all_gather(list(everyone), mine, group=group)
    return everyone
