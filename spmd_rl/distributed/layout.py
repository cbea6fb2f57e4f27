"""`Layout`: each rank's coordinates in one role's model, and its part of the batch.

    layout = Layout(world, tp=2)                                  # [all] 4 ranks: two data shards on two ranks each
    lengths = layout.data.gather("lengths", [len(x) for x in mine])  # [all] one record per data shard

The ranks of a block (`pp` x `cp` x `tp`) compute one model on one data shard. All hold the shard; its leader alone
counts in sums over samples. Weights are sharded over `fsdp`: one copy's data shards times `cp`. With `dp_replicate`
there are several copies (HSDP). Experts are sharded over `ep` of a copy's ranks, each over the remaining ones
(`expert_fsdp`).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spmd_rl.config.ranks import LayoutSizes
from spmd_rl.distributed.collectives import Reduction
from spmd_rl.distributed.world import World

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of a world's ranks, the last varying fastest; torchtitan's names"""
DENSE = ("pp", "dp_replicate", "fsdp", "tp")
"""Axes for most weights: `fsdp` is `dp_shard` x `cp`"""
EXPERTS = ("pp", "dp_replicate", "expert_fsdp", "ep")
"""Axes for experts: `expert_fsdp` x `ep` is `dp_shard` x `cp` x `tp`"""
# Values that leave a reduction unchanged, for ranks that are not their shard's leader.
_NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -math.inf}


class DataShard:
    """One rank's part of the batch, and collectives of data shards."""

    def __init__(self, world: World, ranks: Sequence[Sequence[int]]) -> None:
        """ranks: of each shard, leader first. `rank` is -1 on a rank without a shard."""
        self._world, self._ranks = world, ranks
        self.rank = next((shard for shard, members in enumerate(ranks) if world.rank in members), -1)
        self.size = len(ranks)
        self.is_leader = world.rank == ranks[self.rank][0]
        """True on one rank of each shard, which counts for it"""

    def ranks_of(self, shard: int) -> Sequence[int]:
        """Return a data shard's ranks in the layout's world, leader first."""
        return self._ranks[shard]

    def gather(self, name: str, record: Any, type: Any = Any) -> list[Any]:
        """[all] Return each data shard leader's record, by shard; see `World.gather`."""
        found = self._world.gather(name, record, type)
        return [found[ranks[0]] for ranks in self._ranks]

    def reduce(self, name: str, values: Mapping[str, float], op: Reduction = "sum") -> dict[str, float]:
        """[all] Reduce leaders' values by `sum`, `max` or `mean`, key by key, in float64.

        Other ranks' values are ignored, but RunFailed if keys differ.
        """
        # All ranks of a block hold the same shard: without it each shard would count several times.
        counted = values if self.is_leader else dict.fromkeys(values, _NEUTRAL[op])
        reduced = self._world.reduce(name, counted, "max" if op == "max" else "sum")  # [all]
        return {key: value / self.size for key, value in reduced.items()} if op == "mean" else reduced


class Layout:
    """A world's ranks as meshes over `AXES`, `DENSE` and `EXPERTS`."""

    def __init__(
        self,
        world: World,
        *,
        pp: int = 1,
        dp_replicate: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        key: str = "train",
    ) -> None:
        """[all] Lay out the ranks; `dp_shard` is what other axes leave.

        key: settings section in errors. UserError if the axes do not divide the ranks.
        """
        sizes = LayoutSizes.of(key, world.size, pp=pp, dp_replicate=dp_replicate, cp=cp, tp=tp, ep=ep)
        self.world, self.key = world, key
        self._sizes = {axis: getattr(sizes, axis) for axis in {*AXES, *DENSE, *EXPERTS}}
        shards = range(sizes.dp_replicate * sizes.dp_shard)
        places = [self._places(rank, AXES) for rank in range(world.size)]
        numbers = [place["dp_replicate"] * sizes.dp_shard + place["dp_shard"] for place in places]
        self.data = DataShard(world, [tuple(r for r, n in enumerate(numbers) if n == shard) for shard in shards])
        self._mesh: DeviceMesh | None = None
        self._expert_mesh: DeviceMesh | None = None
        self._cp_group: dist.ProcessGroup | None = None
        self._expert_group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self._mesh = self._mesh_of(DENSE, "fsdp")  # [all]
            if cp > 1:
                self._cp_group = world.process_group("cp", ranks=self.ranks("cp"))  # [block]

    def share_experts(self) -> bool:
        """[all] Form the experts' mesh if sharded unlike other weights; return True if so."""
        if self._expert_mesh is None and (self.size("ep") > 1 or self.size("tp") > 1):
            self._expert_mesh = self._mesh_of(EXPERTS, "expert_fsdp")  # [all]
            self._expert_group = self.group("fsdp")
            if self.size("tp") > 1:
                per_copy = self.size("fsdp") * self.size("tp")
                first = self.world.rank // per_copy * per_copy
                ranks = range(first, first + per_copy)
                self._expert_group = self.world.process_group("experts", ranks=ranks)  # [copy]
        return self.shares_experts

    @property
    def shares_experts(self) -> bool:
        """True if experts have a separate mesh."""
        return self._expert_mesh is not None

    def _mesh_of(self, axes: Sequence[str], always: str) -> DeviceMesh:
        sizes = {axis: self.size(axis) for axis in axes if axis == always or self.size(axis) > 1}
        return self.world.mesh(**sizes)  # [all]

    def _places(self, rank: int, axes: Sequence[str]) -> dict[str, int]:
        found = {}
        for axis in reversed(axes):
            rank, found[axis] = divmod(rank, self._sizes[axis])
        return found

    @property
    def mesh(self) -> DeviceMesh:
        """Torch mesh of `fsdp` and the other `DENSE` axes above 1."""
        assert self._mesh is not None, "a world without process groups has no mesh"
        return self._mesh

    @property
    def data_mesh(self) -> DeviceMesh:
        """Part of `mesh` that sums gradients, as `fully_shard` takes it."""
        return self.mesh["dp_replicate", "fsdp"] if self.size("dp_replicate") > 1 else self.mesh["fsdp"]

    @property
    def expert_mesh(self) -> DeviceMesh:
        """Torch mesh of `expert_fsdp` and the other `EXPERTS` axes above 1."""
        assert self._expert_mesh is not None, "experts are not sharded over ranks"
        return self._expert_mesh

    @property
    def expert_group(self) -> dist.ProcessGroup | None:
        """Process group of ranks with a copy's experts: `expert_fsdp` x `ep`, in order."""
        assert self.shares_experts, "experts are sharded like other weights"
        return self._expert_group

    @property
    def expert_data_mesh(self) -> DeviceMesh:
        """Part of `expert_mesh` that sums experts' gradients."""
        several = self.size("dp_replicate") > 1
        return self.expert_mesh["dp_replicate", "expert_fsdp"] if several else self.expert_mesh["expert_fsdp"]

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self._sizes[axis]

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate along an axis."""
        axes = next(axes for axes in (AXES, DENSE, EXPERTS) if axis in axes)
        return self._places(self.world.rank, axes)[axis]

    def ranks(self, axis: str) -> list[int]:
        """Return the ranks, in order, that differ from this one along one of `AXES` alone."""
        mine = self._places(self.world.rank, AXES) | {axis: 0}
        return [rank for rank in range(self.world.size) if self._places(rank, AXES) | {axis: 0} == mine]

    def collective(self, name: str, kind: str = "compute") -> AbstractContextManager[int]:
        """[stage] Journal a collective of this pipeline stage; see `World.collective`."""
        # Numbered by stage, because stages run different micro-batches at the same time.
        if self.size("pp") == 1:
            return self.world.collective(name, kind)  # [all]
        stage = self.rank("pp")
        per_stage = self.world.size // self.size("pp")
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        return self.world.collective(name, kind, f"stage {stage}", ranks)  # [all] of the stage

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ along `axis` alone; None if its size is 1.

        `dp_shard` has none: weights are sharded over `fsdp`.
        """
        if self._sizes[axis] == 1:
            return None
        if axis == "cp":
            return self._cp_group
        mesh = self.mesh if axis in DENSE else self.expert_mesh
        return mesh.get_group(axis)
