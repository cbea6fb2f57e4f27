"""`Layout`: where each rank of a world stands in one role's model, and which part of the batch it holds.

    layout = Layout(world, tp=2)                                  # [all] 4 ranks: two data shards on two ranks each
    lengths = layout.data.gather("lengths", [len(x) for x in mine])  # [all] one record per data shard

The ranks of a tensor-parallel block compute one model together: all of them hold the same data shard, and one of them,
its leader, counts for it in every sum over samples. With `dp_replicate` the data-parallel ranks fall into groups of
neighbours: each group holds all weights once, shared out over its ranks (hybrid sharding, HSDP). Each block has a data
shard of its own all the same. Not built: pipeline, context and expert parallelism.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.config.ranks import check_layout
from spmd_rl.distributed.collectives import Reduction
from spmd_rl.distributed.world import World

AXES = ("dp_replicate", "dp_shard", "tp")
"""Of a mesh, the last one varying fastest; torchtitan's names."""
_NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -math.inf}


class DataShard:
    """One rank's part of the batch: which it is, and how the data shards meet. Made by `Layout`."""

    def __init__(self, world: World, ranks_per_shard: int) -> None:
        """`ranks_per_shard` neighbouring ranks hold the same shard; the first of them leads."""
        self._world, self._block = world, ranks_per_shard
        self.rank, self.size = world.rank // ranks_per_shard, world.size // ranks_per_shard
        self.is_leader = world.rank % ranks_per_shard == 0
        """Whether this rank counts for its shard: exactly one rank of each does."""

    def ranks_of(self, shard: int) -> tuple[int, ...]:
        """The ranks, of the layout's world, that hold data shard number `shard`; the leader comes first."""
        return tuple(range(shard * self._block, (shard + 1) * self._block))

    def gather(self, name: str, record: Any, type: Any = Any) -> list[Any]:
        """[all] The record of each data shard's leader, by shard; what the other ranks pass is ignored.

        Records and `type` are as in `World.gather`.
        """
        return self._world.gather(name, record, type)[:: self._block]

    def reduce(self, name: str, values: Mapping[str, float], op: Reduction = "sum") -> dict[str, float]:
        """[all] `sum`, `max` or `mean` over the leaders' values, key by key, in float64; equal on all ranks.

        The other ranks' values are ignored, but their keys must be the same: else RunFailed.
        """
        counted = values if self.is_leader else dict.fromkeys(values, _NEUTRAL[op])
        reduced = self._world.reduce(name, counted, "max" if op == "max" else "sum")  # [all]
        return {key: value / self.size for key, value in reduced.items()} if op == "mean" else reduced


class Layout:
    """A world's ranks as a mesh with the axes `AXES`: copies of the model, shards of a copy, tensor parallelism."""

    def __init__(self, world: World, *, tp: int = 1, dp_replicate: int = 1, key: str = "train") -> None:
        """[all] The size of `dp_shard` is what is left of the world's ranks.

        key: the settings section that an error names. UserError if `tp` does not divide the ranks, or `dp_replicate`
        what `tp` leaves of them.
        """
        check_layout(key, world.size, tp, dp_replicate)
        self.world, self.key = world, key
        self.data = DataShard(world, tp)
        sizes = (dp_replicate, world.size // tp // dp_replicate, tp)
        self._sizes = dict(zip(AXES, sizes, strict=True))
        self._mesh: DeviceMesh | None = None
        if dist.is_initialized():
            axes = {axis: size for axis, size in self._sizes.items() if axis == "dp_shard" or size > 1}
            self._mesh = world.mesh(**axes)  # [all]

    @property
    def mesh(self) -> DeviceMesh:
        """The torch mesh, with the axis `dp_shard`, and of the others those whose size is more than 1."""
        assert self._mesh is not None, "a world without process groups has no mesh"
        return self._mesh

    @property
    def data_mesh(self) -> DeviceMesh:
        """The part of `mesh` over which gradients are summed, as `fully_shard` takes it: without the axis `tp`."""
        return self.mesh["dp_replicate", "dp_shard"] if self._sizes["dp_replicate"] > 1 else self.mesh["dp_shard"]

    def size(self, axis: str) -> int:
        """Number of ranks along one of `AXES`."""
        return self._sizes[axis]

    def rank(self, axis: str) -> int:
        """This rank's place along one of `AXES`."""
        block, tp = divmod(self.world.rank, self._sizes["tp"])
        return dict(zip(AXES, (*divmod(block, self._sizes["dp_shard"]), tp), strict=True))[axis]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of the ranks that differ from this one along `axis` alone; None where its size is 1."""
        return self.mesh.get_group(axis) if self._sizes[axis] > 1 else None
