"""`Buckets`: whole named tensors from trainer ranks to generator ranks, by broadcasts of their bytes.

    buckets = Buckets(world, trainers)                       # [all] opens the communicator
    for name, tensor in buckets.send(policy.weights()): ...  # [train]: passes them on
    for name, tensor in buckets.receive(): ...               # [generate] meanwhile

Every trainer streams all weights; trainer i mod n broadcasts bucket i, so that several network cards send. Bytes go
from device to device (NCCL; gloo on the CPU), headers through the host. A rank holds one bucket, or the largest tensor,
besides its part; a trainer rank also the gathered tensor.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.distributed import World

BUCKET_BYTES = 512 * 2**20
"""Size of a bucket; larger tensors go alone"""
# A tensor begins at a multiple of this, so that it can be viewed as any dtype.
ALIGNED = 16
HEADERS = "publish: bucket"
BYTES = "publish: bytes of a bucket"

TensorHeader = tuple[str, str, list[int]]
"""Name, dtype and shape of a tensor."""


class Buckets:
    """Broadcasts of whole tensors between both sides."""

    def __init__(self, world: World, trainers: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> None:
        """[all] world: both sides. trainers: indices of trainer ranks in it."""
        self._world, self._trainers, self._bucket_bytes = world, trainers, bucket_bytes
        self._group = world.process_group("weights")  # [all]
        self._number = 0
        self._broadcast(torch.zeros(ALIGNED, dtype=torch.uint8, device=world.device))  # [all] opens it

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """[train] Broadcast each tensor when requested, and pass it on.

        A tensor need be valid only until the next is requested.
        """
        self._number, flat, size = 0, torch.empty(0, dtype=torch.uint8, device=self._world.device), 0
        headers: list[TensorHeader] = []
        for name, tensor in weights:  # [all]
            if headers and size + tensor.nbytes > self._bucket_bytes:
                self._send(headers, flat[:size])  # [all]
                headers, size = [], 0
            if size + tensor.nbytes > len(flat):
                flat = self._new(max(self._bucket_bytes, tensor.nbytes))
            if self._sends:
                flat[size : size + tensor.nbytes] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            headers.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            size = _aligned(size + tensor.nbytes)
            yield name, tensor
        if headers:
            self._send(headers, flat[:size])  # [all]
        self._world.broadcast(HEADERS, [], src=self._trainers[0])  # [all]

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """[generate] Yield every tensor, valid until the next is requested; meets `send`."""
        self._number, flat = 0, torch.empty(0, dtype=torch.uint8, device=self._world.device)
        while headers := self._world.broadcast(HEADERS, None, src=self._trainers[0]):  # [all]
            sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in headers]
            total = sum(map(_aligned, sizes))
            if total > len(flat):
                flat = self._new(max(self._bucket_bytes, total))
            self._broadcast(flat[:total])  # [all]
            begin = 0
            for (name, dtype, shape), size in zip(headers, sizes, strict=True):
                yield name, flat[begin : begin + size].view(getattr(torch, dtype)).view(shape)
                begin += _aligned(size)

    @property
    def _sends(self) -> bool:
        return self._world.rank == self._trainers[self._number % len(self._trainers)]

    def _new(self, size: int) -> Tensor:
        return torch.empty(_aligned(size), dtype=torch.uint8, device=self._world.device)

    def _send(self, headers: list[TensorHeader], flat: Tensor) -> None:
        self._world.broadcast(HEADERS, headers, src=self._trainers[0])  # [all]
        self._broadcast(flat)  # [all]

    def _broadcast(self, flat: Tensor) -> None:
        source = self._world.ranks[self._trainers[self._number % len(self._trainers)]]
        with self._world.collective(BYTES, kind="copy"):  # [all]
            dist.broadcast(flat, source, group=self._group)  # [all]
        self._world.progress()
        self._number += 1


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
