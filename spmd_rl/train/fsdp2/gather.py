"""Whole weights from shards, for publishing: few large gathers in the compute dtype through reused buffers.

FSDP's gather costs several times as much, by allocating for every layer. Casting first halves the traffic, and rounds
as the forward pass does.
"""

import math
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmd_rl.base.devices import kind
from spmd_rl.distributed import Layout
from spmd_rl.train.fsdp2.tensor_parallel import shape_of_share, whole

BUCKET_BYTES = 2**25
"""Bytes per gather on the CPU; larger parameters go alone"""
DEVICE_BUCKET_BYTES = 2**28
"""Bytes per gather on devices, where launch latency grows with ranks"""

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Bucket = list[tuple[str, DTensor]]


class Gather:
    """Gather of parameters, each sharded in one dimension over one mesh axis by `fully_shard`.

    Gathers stay inside a copy of the model. Tensor-parallel parameters are joined afterwards, one by one.
    """

    def __init__(
        self, parameters: Mapping[str, DTensor], dtype: torch.dtype, layout: Layout, stacked: Collection[str] = ()
    ) -> None:
        """[all] dtype: of the yielded tensors. stacked: parameters that may come in slices of experts."""
        on_device = kind(layout.world.device) != "cpu"
        room = DEVICE_BUCKET_BYTES if on_device else BUCKET_BYTES
        buckets = list(_buckets(parameters, dtype.itemsize, room, layout))
        self._names, self._dtype = [[name for name, _ in bucket] for bucket in buckets], dtype
        self._layout = layout
        slices = {name: _slices(parameters[name], dtype.itemsize, room, layout) for name in stacked}
        self.experts = {name: found for name, found in slices.items() if found}
        """experts of each slice, by parameter"""

    @torch.no_grad()
    def whole(self, parameters: Mapping[str, DTensor]) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield each parameter whole and contiguous, or slice by slice; valid until the next."""
        buffers = _Buffers()
        for names in self._names:
            if names[0] in self.experts:
                for tensor in self._sliced(parameters[names[0]], buffers, len(self.experts[names[0]])):
                    yield names[0], tensor
                continue
            bucket = [(name, parameters[name]) for name in names]
            for name, tensor in self._gather(bucket, buffers):
                yield name, whole(tensor, parameters[name], self._layout)  # [all]

    def _gather(self, bucket: Bucket, buffers: "_Buffers") -> Iterator[tuple[str, Tensor]]:
        pieces = [_piece(p, self._layout) for _, p in bucket]
        device = bucket[0][1].to_local().device
        mine = buffers.take("mine", sum(pieces), self._dtype, device)
        for (_, p), part in zip(bucket, mine.split(pieces), strict=True):
            # FSDP's shards on the last ranks are shorter than the piece.
            shard = p.to_local().flatten()
            part[: shard.numel()].copy_(shard)
        gathered = self._all_gather(mine, bucket[0][1], buffers)
        size, columns = len(gathered), gathered.split(pieces, dim=1)
        for (name, p), column in zip(bucket, columns, strict=True):
            # A single parameter is contiguous already, and its copy could take gigabytes.
            if size > 1 and len(bucket) > 1:
                column = buffers.take("whole", column.numel(), self._dtype, device).view(column.shape).copy_(column)
            yield name, _whole(column, p, self._layout)

    def _sliced(self, parameter: DTensor, buffers: "_Buffers", count: int) -> Iterator[Tensor]:
        local = parameter.to_local()
        for part in local.chunk(count):
            mine = buffers.take("mine", part.numel(), self._dtype, local.device).copy_(part.flatten())
            yield _whole(self._all_gather(mine, parameter, buffers), parameter, self._layout, count)

    def _all_gather(self, mine: Tensor, parameter: DTensor, buffers: "_Buffers") -> Tensor:
        group = _group(parameter, self._layout)
        if group is None or group.size() == 1:
            return mine[None]
        gathered = buffers.take("gathered", group.size() * len(mine), self._dtype, mine.device)
        with self._layout.collective("weights: gather", kind="copy"):  # [all]
            _all_gather(gathered, mine, group=group)
        return gathered.view(group.size(), -1)


def _slices(parameter: DTensor, itemsize: int, room: int, layout: Layout) -> list[list[int]]:
    # Each rank gives as many experts to a slice, at least one. No slices if all experts fit the room.
    shape, chunks = shape_of_share(parameter, layout), layout.size("ep") if layout.shares_experts else 1
    if _dim(parameter) == 0:
        chunks *= layout.size(_axis(parameter))
    # Else the last ranks have fewer.
    if shape[0] % chunks:
        return []
    own = shape[0] // chunks
    count = min(own, -(-shape.numel() * itemsize // room))
    while own % count:
        count += 1
    begins, length = range(0, own, own // count), own // count
    slices = [[chunk * own + begin + i for chunk in range(chunks) for i in range(length)] for begin in begins]
    return slices if count > 1 else []


def _whole(column: Tensor, parameter: DTensor, layout: Layout, count: int = 1) -> Tensor:
    # From the pieces [ranks, piece] of all ranks of a copy.
    axis, dim, shape = _axis(parameter), _dim(parameter), shape_of_share(parameter, layout)
    shape = torch.Size([shape[0] // count, *shape[1:]])
    # Ranks along `ep` are neighbours, and each of them has experts of its own, which it shares with those of other `ep`
    parts = column.view(layout.size(axis), -1, column.shape[1]).transpose(0, 1)
    # Shards of the first dimension are end to end, and only the last ones are shorter.
    if dim == 0:
        return parts.reshape(len(parts), -1)[:, : shape.numel() // len(parts)].reshape(shape)
    # Shards of one size, one after the other: each row of the whole has a part in each.
    rows, *rest = parameter.to_local().shape
    return parts.reshape(*parts.shape[:2], rows // count, *rest).movedim(1, dim + 1).reshape(shape)


def _group(parameter: DTensor, layout: Layout) -> dist.ProcessGroup | None:
    """Return the group of ranks that hold a parameter, or a layer's experts."""
    return layout.group("fsdp") if _axis(parameter) == "fsdp" else layout.expert_group


def _axis(parameter: DTensor) -> str:
    return next(axis for axis in parameter.device_mesh.mesh_dim_names if axis in ("fsdp", "expert_fsdp"))


def _dim(parameter: DTensor) -> int:
    return parameter.placements[parameter.device_mesh.mesh_dim_names.index(_axis(parameter))].dim


def _piece(parameter: DTensor, layout: Layout) -> int:
    # The largest shard: FSDP splits a dimension like `torch.chunk`.
    shape, dim, size = list(shape_of_share(parameter, layout)), _dim(parameter), layout.size(_axis(parameter))
    if _axis(parameter) == "expert_fsdp":
        # Expert parallelism split the first dimension before FSDP.
        shape[0] //= layout.size("ep")
    return -(-shape[dim] // size) * (math.prod(shape) // max(1, shape[dim]))


def _buckets(parameters: Mapping[str, DTensor], itemsize: int, room_bytes: int, layout: Layout) -> Iterator[Bucket]:
    # At most `room_bytes` each unless of a single parameter, each of one group.
    bucket: Bucket = []
    room = room_bytes
    for name, parameter in parameters.items():
        cost = parameter.numel() * itemsize
        if bucket and (cost > room or _group(parameter, layout) is not _group(bucket[-1][1], layout)):
            yield bucket
            bucket, room = [], room_bytes
        bucket.append((name, parameter))
        room -= cost
    if bucket:
        yield bucket


class _Buffers:
    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held = self._held.get(name)
        if held is None or held.numel() < numel:
            held = self._held[name] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel]
