"""What FSDP does with shards and gradients between CPU ranks of one machine, and alone: no socket, no spare copy.

    comms = comm.open(model, world, dtype)     # [all] before sharding; None where a process group does it
    ... fully_shard(...); comms.attach(unit)   # for each unit

A socket, which is what gloo has, copies every byte several times and wakes threads for it. Here FSDP packs its shards,
and its gradients, straight into memory that all ranks see; they meet, and read in place. Gradients stay in the compute
dtype until they are summed, in float32 and in rank order: the very numbers, at half the traffic.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from spmd_rl.distributed import SharedWindow, World
from spmd_rl.errors import RunFailed

LIMIT = 2**30
"""Bytes of all ranks' gradients of one unit, beyond which they go through the process group."""


class Gather:
    """FSDP's all-gather: the window's half is the result, and packing this rank's shard writes its part of it."""

    def __init__(self, window: SharedWindow) -> None:
        self._window, self._turn = window, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for all shards, theirs until two gathers later: FSDP has copied them out by then."""
        self._turn += 1
        return _elements(self._window.half(self._turn), dtype, size[0])

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False):
        """[all] Everyone has written."""
        self._window.meet()


class Reduce:
    """FSDP's reduce-scatter: each rank writes its gradient, and sums its own part of everyone's in `master` dtype."""

    def __init__(self, window: SharedWindow | None, rank: int, size: int, master: torch.dtype) -> None:
        """`window`: None at size 1."""
        self._window, self._rank, self._size, self._master = window, rank, size, master
        self._turn, self._wants_output = 0, False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for this rank's gradient, and then, asked again, for its part of the sum."""
        (length,) = size
        self._wants_output = not self._wants_output
        if not self._wants_output:
            return torch.empty(length, dtype=self._master)
        if self._window is None:
            return torch.empty(length, dtype=dtype)
        self._turn += 1
        return _elements(self._window.half(self._turn), dtype, self._size * length).view(self._size, length)[self._rank]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ):
        """[all] Everyone has written; this rank's part of all gradients is summed."""
        self._window.meet()
        half = _elements(self._window.half(self._turn), input_tensor.dtype, self._size * len(input_tensor))
        parts = half.view(self._size, self._size, -1)[:, self._rank]
        output_tensor.copy_(parts[0])
        for part in parts[1:]:
            output_tensor += part


class Comms:
    """Both, for all units of one model."""

    def __init__(self, gather: Gather | None, reduce: Reduce | None) -> None:
        self._gather, self._reduce = gather, reduce

    def attach(self, unit: FSDPModule) -> None:
        """Let a sharded unit use them."""
        if self._gather is not None:
            unit.set_custom_all_gather(self._gather)
        if self._reduce is not None:
            unit.set_custom_reduce_scatter(self._reduce)


def open_comms(units: Sequence[Sequence[nn.Parameter]], world: World, dtype: torch.dtype) -> Comms | None:
    """[all] For units of these parameters, in compute dtype `dtype`; None where it is for the process group to do.

    Which of the two sums gradients never depends on the memory that happens to be free: with more than two ranks their
    sums differ in the last bits. RunFailed, on all ranks, if what is needed cannot be had.
    """
    trained = [p.dtype for unit in units for p in unit if p.requires_grad]
    master, trains = next(iter(trained), dtype), bool(trained)
    if world.device.type == "cpu" and world.size == 1:
        return Comms(None, Reduce(None, 0, 1, master) if trains else None)
    most = max(sum(_padded(p, world.size) for p in unit) for unit in units) * dtype.itemsize
    if not SharedWindow.possible(world) or world.size * most > LIMIT:
        return None
    meet = world.bare_meeting("fsdp")  # [all]
    gathered = SharedWindow.open(world, most, meet)  # [all]
    reduced = SharedWindow.open(world, world.size * most, meet) if trains else None  # [all]
    if gathered is None or (trains and reduced is None):
        raise RunFailed(f"no memory for {2 * (1 + world.size) * most >> 20} MiB that the ranks would share")
    return Comms(Gather(gathered), reduced and Reduce(reduced, world.rank, world.size, master))


def _padded(parameter: nn.Parameter, size: int) -> int:
    """Elements of all shards: FSDP pads the first dimension to a multiple of the ranks."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return -(-rows // size) * size * (parameter.numel() // max(1, rows))


def _elements(memory: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    return memory[: count * dtype.itemsize].view(dtype)
