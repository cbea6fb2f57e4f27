"""`ReplicaBroadcast`: weight sync within a replica, from its first rank, which fetches, to the others.

The ranks of a replica (`engine.tp` x `engine.pp`) need the same weights, and lie close together: a version comes once
over the network for each replica, and goes on in buckets over the replica's own group (NCCL, or gloo on the CPU).
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.distributed import World
from spmd_rl.weights import messages

BUCKET_BYTES = 64 * 2**20
"""Tensors are sent together until they are as large as that."""

BUCKET = "publish: bucket"

NamedTensor = tuple[str, Tensor, bytes]
"""Name, tensor and digest of its bytes."""


class ReplicaBroadcast:
    """The broadcasts of one replica, whose ranks are neighbours in `world`."""

    def __init__(self, world: World, num_ranks: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        """[all] world: of the ranks that generate, `num_ranks` of them in each replica."""
        assert world.size % num_ranks == 0, "checked with the settings"
        index = world.rank // num_ranks
        block = range(index * num_ranks, (index + 1) * num_ranks)
        self.leads = world.rank == block[0]
        self._world = world.subset(f"weights {index}", block)  # [block]
        self._group = world.process_group("weights", ranks=block) if num_ranks > 1 else None  # [block]
        self._first, self._bucket_bytes = world.ranks[block[0]], bucket_bytes

    def broadcast(self, name: str, record: Any) -> Any:
        """[all] of the replica: the record of its first rank."""
        return self._world.broadcast(name, record)

    def carry(self, pieces: Iterable[NamedTensor] | None) -> Iterable[NamedTensor]:
        """[all] of the replica, while they iterate: the first rank's tensors, on every rank.

        On the device if the replica has several ranks, else as they are given.

        pieces: None on the others, where the digests are of the bytes that arrived.
        """
        if pieces is None:
            return self._receive()
        return self._send(pieces) if self._group else pieces

    def _send(self, pieces: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        for bucket in _buckets(pieces, self._bucket_bytes):
            tensors = [tensor.to(self._world.device) for _, tensor, _ in bucket]
            heads = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor, _ in bucket]
            self._world.broadcast(BUCKET, heads)  # [all]
            self._broadcast_bytes(torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]))  # [all]
            for (name, _, digest), tensor in zip(bucket, tensors, strict=True):
                yield name, tensor, digest
        self._world.broadcast(BUCKET, [])  # [all]

    def _receive(self) -> Iterator[NamedTensor]:
        while heads := self._world.broadcast(BUCKET, None):  # [all]
            sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in heads]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._world.device)
            self._broadcast_bytes(flat)  # [all]
            for (name, dtype, shape), part in zip(heads, flat.split(sizes), strict=True):
                tensor = part.clone().view(getattr(torch, dtype)).view(shape)  # a copy: `part` may lie askew
                yield name, tensor, messages.digest(memoryview(part.cpu().numpy()))

    def _broadcast_bytes(self, flat: Tensor) -> None:
        """[all] The first rank's bytes, everywhere."""
        with self._world.collective("publish: bytes of a bucket", kind="copy"):  # [all]
            dist.broadcast(flat, self._first, group=self._group)


def _buckets(pieces: Iterable[NamedTensor], num_bytes: int) -> Iterator[list[NamedTensor]]:
    """The pieces in order, some at a time: until they have so many bytes."""
    bucket: list[NamedTensor] = []
    for piece in pieces:
        bucket.append(piece)
        if sum(tensor.nbytes for _, tensor, _ in bucket) >= num_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
