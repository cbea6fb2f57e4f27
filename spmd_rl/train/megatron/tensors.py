"""`Tensors`: parameters by checkpoint names, whole for publishing and sharded for saving."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from spmd_rl.distributed import Layout
from spmd_rl.train.megatron.mapping import Piece, Shapes, TensorShare, rectangles
from spmd_rl.train.megatron.optimizer import MOMENTS, DistributedAdamW, Master
from spmd_rl.train.megatron.parameters import Parameter, StoredPart, parts_of
from spmd_rl.train.state import MODEL, OPTIMIZER, Shard


class Tensors:
    """This rank's tensors. Pieces follow from the layout, so ranks know each other's."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        local: Mapping[str, nn.Parameter],
        trained: Collection[str],
        dtype: torch.dtype,
        shapes: Shapes,
        layout: Layout,
        groups: ProcessGroupCollection,
        head_dim: int,
    ) -> None:
        """parameters: of the whole model; `local`: on this rank. dtype: to publish. shapes: the checkpoint's."""
        self._trained, self._dtype = trained, dtype
        self._all, self._layout, self._groups, self._shapes = parameters, layout, groups, shapes
        self._head_dim = head_dim
        here = [one for one in parameters if one.stage == layout.rank("pp") and one.owner in (None, layout.rank("ep"))]
        assert {one.name for one in here} == local.keys(), {one.name for one in here} ^ local.keys()
        for one in here:
            found = tuple(local[one.name].shape)
            assert one.rule.shape(shapes, self._share_of(one)) == found, (one.name, found)
        self._here = {local[one.name]: one for one in here}
        self.buffers = {one.rule.names[0]: local[one.name] for one in here if one.rule.is_buffer}

    def _share_of(self, one: Parameter, rank: int | None = None) -> TensorShare:
        if one.owner is not None:
            return TensorShare(0, 1, self._head_dim)
        return TensorShare(self._layout.rank("tp") if rank is None else rank, self._layout.size("tp"), self._head_dim)

    def _pieces(self, one: Parameter, rank: int | None = None) -> list[Piece]:
        return list(one.rule.pieces(self._shapes, self._share_of(one, rank)))

    def frozen(self) -> Iterator[StoredPart]:
        """Yield this rank's parts that are not trained."""
        for tensor, one in ((t, one) for t, one in self._here.items() if one.name not in self._trained):
            yield from parts_of(tensor.detach(), tuple(slice(0, n) for n in tensor.shape), self._pieces(one))

    def parts_of(self, master: Master, tensor: Tensor) -> Iterator[StoredPart]:
        """Yield the parts of a master's weights or moment, [end - begin]."""
        pieces, place = self._pieces(self._here[master.parameter]), 0
        for region in rectangles(tuple(master.parameter.shape), master.begin, master.end):
            sizes = [one.stop - one.start for one in region]
            count = torch.Size(sizes).numel()
            yield from parts_of(tensor[place : place + count].view(sizes), region, pieces)
            place += count

    def name_of(self, master: Master) -> str:
        """Return the name of a master's parameter."""
        return self._here[master.parameter].name

    def counts(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank counts a parameter in sums over ranks with equal copies."""
        one = self._here[parameter]
        return not one.is_copy and (one.rule.is_cut or self._layout.rank("tp") == 0)

    def shards(self, optimizer: DistributedAdamW, with_buffers: bool) -> Iterator[Shard]:
        """Yield the shards of `ShardedModel.state`."""
        yield Shard(f"{OPTIMIZER}step", (), (), optimizer.steps, self._layout.world.rank == 0)
        given: set[str] = set()
        for master in optimizer.masters:
            kept = {f"{OPTIMIZER}{moment}/": master.state[moment] for moment in MOMENTS}
            for prefix, tensor in ({MODEL: master.weights.detach()} | kept).items():
                for part in self.parts_of(master, tensor):
                    begin = tuple(one.start for one in part.stored)
                    given.add(prefix + part.name)
                    yield Shard(prefix + part.name, part.shape, begin, part.tensor, self.counts(master.parameter))
        for name, buffer in self.buffers.items() if with_buffers else ():
            given.add(MODEL + name)
            is_mine = self._groups.tp.rank() == self._groups.dp_cp.rank() == 0
            yield Shard(MODEL + name, tuple(buffer.shape), (0,), buffer, is_mine)
        of_trained = (MODEL, *(f"{OPTIMIZER}{moment}/" for moment in MOMENTS))
        for one in self._all:
            kinds = (MODEL,) if with_buffers and one.rule.is_buffer else ()
            for prefix, name in product(of_trained if one.name in self._trained else kinds, one.rule.names):
                if prefix + name not in given:
                    given.add(prefix + name)
                    yield Shard(prefix + name, self._shapes(name), (), None, False)

    @torch.no_grad()
    def whole(self, trained_alone: bool = False) -> Iterator[tuple[str, Tensor]]:
        """[all] Yield each stored tensor once, from its stage; valid until the next."""
        local = {one.name: tensor.detach() for tensor, one in self._here.items()}
        dtype, device = self._dtype, self._layout.world.device
        experts: list[Tensor] = []
        neighbours = [one for one in self._all if not one.is_copy and (one.name in self._trained or not trained_alone)]
        for place, one in enumerate(neighbours):
            self._layout.world.progress()
            how = {"dtype": torch.float32 if one.rule.is_buffer else dtype, "device": device}
            found = {name: torch.empty(self._shapes(name), **how) for name in one.rule.names}
            if one.stage == self._layout.rank("pp"):
                if one.owner is None:
                    parts = self._gathered(local[one.name], "tp") if one.rule.is_cut else [local[one.name]]  # [stage]
                else:  # those at the same place of all ranks, once
                    experts = experts or self._gathered(
                        local[neighbours[place + self._layout.rank("ep")].name], "ep"
                    )  # [stage]
                    parts = [experts.pop(0)]
                for rank, part in enumerate(parts):
                    for piece in self._pieces(one, rank):
                        found[piece.name][piece.stored] = part[piece.region]
            for name, tensor in found.items():
                yield name, self._of_stage(tensor, one.stage)  # [all]

    def _gathered(self, tensor: Tensor, axis: str) -> list[Tensor]:
        size, group = self._layout.size(axis), getattr(self._groups, axis)
        if size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(size)]
        with self._layout.collective("weights: gather", kind="copy"):  # [all] of the stage
            dist.all_gather(parts, tensor.contiguous(), group=group)
        return parts

    def _of_stage(self, tensor: Tensor, stage: int) -> Tensor:
        if self._layout.size("pp") > 1:
            with self._layout.world.collective("weights: from their stage", "copy", written=False):  # [all]
                dist.broadcast(tensor, group=self._groups.pp, group_src=stage)  # [all] of the line
        return tensor
