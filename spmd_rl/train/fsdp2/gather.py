"""Whole weights out of shards, for publishing: few large gathers in the compute dtype through buffers that are reused.

FSDP's own gather costs several times as much: it allocates anew for every layer, and touching fresh memory is dearer
than copying. Casting before the gather halves what travels, and rounds as the forward pass does.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 2**25
"""Gathered at a time; a larger parameter goes alone."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@torch.no_grad()
def whole_weights(parameters: Mapping[str, DTensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """[all] Each parameter whole: name and contiguous tensor in `dtype`, valid until the next one is asked for.

    The parameters are sharded in their first dimension over one mesh axis, as `fully_shard` does it.
    """
    buffers = _Buffers()
    for bucket in _buckets(parameters, dtype.itemsize):
        group = bucket[0][1].device_mesh.get_group()
        size = dist.get_world_size(group)
        pieces = [_piece(p, size) for _, p in bucket]
        device = bucket[0][1].to_local().device
        mine = buffers.take("mine", sum(pieces), dtype, device)
        for (_, p), part in zip(bucket, mine.split(pieces), strict=True):
            shard = p.to_local().flatten()  # shorter than the piece on the last ranks
            part[: shard.numel()].copy_(shard)
        gathered = mine
        if size > 1:
            gathered = buffers.take("gathered", size * sum(pieces), dtype, device)
            _all_gather(gathered, mine, group=group)
        columns = gathered.view(size, -1).split(pieces, dim=1)
        for (name, p), column in zip(bucket, columns, strict=True):
            if size > 1:
                column = buffers.take("whole", column.numel(), dtype, device).view(column.shape).copy_(column)
            yield name, column.view(-1)[: p.numel()].view(p.shape)


def _piece(parameter: DTensor, size: int) -> int:
    """Elements of the largest shard: FSDP cuts the first dimension like `torch.chunk`."""
    rows = parameter.shape[0]
    return -(-rows // size) * (parameter.numel() // max(1, rows))


def _buckets(parameters: Mapping[str, DTensor], itemsize: int) -> Iterator[list[tuple[str, DTensor]]]:
    """In order, at most `BUCKET_BYTES` each unless it is a single parameter."""
    bucket: list[tuple[str, DTensor]] = []
    room = BUCKET_BYTES
    for name, parameter in parameters.items():
        cost = parameter.numel() * itemsize
        if bucket and cost > room:
            yield bucket
            bucket, room = [], BUCKET_BYTES
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
