"""Whole weights out of shards, for publishing: few large gathers in the compute dtype through buffers that are reused.

FSDP's own gather costs several times as much: it allocates anew for every layer, and touching fresh memory is dearer
than copying. Casting before the gather halves what travels, and rounds as the forward pass does.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmd_rl.distributed import Layout
from spmd_rl.train.fsdp2.tensor_parallel import sharded_dim, whole

BUCKET_BYTES = 2**25
"""Gathered at a time on the CPU; a larger parameter goes alone."""
DEVICE_BUCKET_BYTES = 2**28
"""The same on devices, where a gather's start costs more than its bytes, the more so the more ranks there are."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


Bucket = list[tuple[str, DTensor]]


class Gather:
    """The gather of one model's parameters, each sharded in one dimension over one mesh axis by `fully_shard`.

    Ranks that hold a copy of the model together meet each other alone, not those of the other copies.
    Parameters that tensor parallelism has cut before are put together in a second stage, one by one.
    """

    def __init__(self, parameters: Mapping[str, DTensor], dtype: torch.dtype, layout: Layout) -> None:
        """[all] `dtype`: what is handed out."""
        on_device = layout.world.device.type != "cpu"
        buckets = list(_buckets(parameters, dtype.itemsize, DEVICE_BUCKET_BYTES if on_device else BUCKET_BYTES))
        self._names, self._dtype = [[name for name, _ in bucket] for bucket in buckets], dtype
        self._layout, self._group = layout, layout.group("dp_shard")
        self._rank, self._size = layout.rank("dp_shard"), layout.size("dp_shard")

    @torch.no_grad()
    def whole(self, parameters: Mapping[str, DTensor]) -> Iterator[tuple[str, Tensor]]:
        """[all] Each of the parameters whole: name and contiguous tensor, valid until the next one is asked for."""
        buffers = _Buffers()
        for names in self._names:
            bucket = [(name, parameters[name]) for name in names]
            for name, tensor in self._gather(bucket, buffers):
                yield name, whole(tensor, parameters[name], self._layout)  # [all]

    def _gather(self, bucket: Bucket, buffers: "_Buffers") -> Iterator[tuple[str, Tensor]]:
        pieces = [_piece(_shape(p, self._layout), self._size, _dim(p)) for _, p in bucket]
        device = bucket[0][1].to_local().device
        mine = buffers.take("mine", sum(pieces), self._dtype, device)
        for (_, p), part in zip(bucket, mine.split(pieces), strict=True):
            shard = p.to_local().flatten()  # shorter than the piece on the last ranks
            part[: shard.numel()].copy_(shard)
        gathered = mine
        if self._size > 1:
            gathered = buffers.take("gathered", self._size * sum(pieces), self._dtype, device)
            with self._layout.world.collective("weights: gather", kind="copy"):  # [all]
                _all_gather(gathered, mine, group=self._group)
        columns = gathered.view(self._size, -1).split(pieces, dim=1)
        for (name, p), column in zip(bucket, columns, strict=True):
            if self._size > 1:
                column = buffers.take("whole", column.numel(), self._dtype, device).view(column.shape).copy_(column)
            shape, dim = _shape(p, self._layout), _dim(p)
            if dim == 0:
                yield name, column.reshape(-1)[: shape.numel()].view(shape)
            else:  # shards of one size, one after the other: each row of the whole has a part in each
                yield name, column.reshape(self._size, *p.to_local().shape).movedim(0, dim).reshape(shape)


def _shape(parameter: DTensor, layout: Layout) -> torch.Size:
    """What the ranks of this one's copy, at its place in their blocks, hold together."""
    shape, dim = list(parameter.shape), sharded_dim(parameter)
    if dim is not None:
        shape[dim] //= layout.size("tp")
    return torch.Size(shape)


def _dim(parameter: DTensor) -> int:
    """The dimension in which the ranks of a copy share a parameter out."""
    return parameter.placements[parameter.device_mesh.mesh_dim_names.index("dp_shard")].dim


def _piece(shape: torch.Size, size: int, dim: int) -> int:
    """Elements of the largest shard: FSDP cuts a dimension like `torch.chunk`."""
    return -(-shape[dim] // size) * (shape.numel() // max(1, shape[dim]))


def _buckets(parameters: Mapping[str, DTensor], itemsize: int, room_bytes: int) -> Iterator[Bucket]:
    """In order, at most `room_bytes` each unless it is a single parameter."""
    bucket: Bucket = []
    room = room_bytes
    for name, parameter in parameters.items():
        cost = parameter.numel() * itemsize
        if bucket and cost > room:
            yield bucket
            bucket, room = [], room_bytes
        bucket.append((name, parameter))
        room -= cost
    if bucket:
        yield bucket


class _Buffers:
    """Flat scratch tensors that grow and are never given back while a publish lasts."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held = self._held.get(name)
        if held is None or held.numel() < numel:
            held = self._held[name] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel]
