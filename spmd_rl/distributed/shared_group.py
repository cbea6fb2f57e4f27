"""`shm`: a torch.distributed backend for CPU ranks of one machine over shared memory.

A collective copies its inputs into shared memory, meets the other ranks, and copies or sums in place, in rank order,
bfloat16 and float16 in float32, rounded once. Operations are complete when they return, `async_op` or not. Not
implemented: send and recv.
"""
# gloo sends every byte through a loopback socket.

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import ReduceOp
from torch.futures import Future

from spmd_rl.distributed.shared_memory import SharedMemory, layout

NAME = "shm"


def _work() -> dist.Work:
    future: Future = Future()
    future.set_result(None)
    return _create_work_from_future(future)


class SharedGroup(dist.ProcessGroup):
    """A process group over shared memory, called by `torch.distributed.all_reduce` and the like."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """[all] Map the group's memory. `timeout` is unused: waits are unlimited."""
        super().__init__(rank, size)
        self._index, self._count = rank, size
        self._peers = [peer for peer in range(size) if peer != rank]
        self._memory = SharedMemory(store, rank, size)  # [all]
        self._done = _work()
        self._name = ""

    @torch.no_grad()
    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """[all] Gather each rank's tensor, by rank."""
        for outputs, tensor in zip(output_tensors, input_tensors, strict=True):
            self._gather(outputs, tensor)
        return self._done

    @torch.no_grad()
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """[all] Gather each rank's tensor into one tensor."""
        with _Contiguous(output) as whole:
            self._gather([part.view_as(input) for part in whole.view(self._count, -1)], input)
        return self._done

    @torch.no_grad()
    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> dist.Work:
        """[all] Gather tensors on the root alone."""
        self._gather(output_tensors[0] if self._index == opts.rootRank else (), input_tensors[0])
        return self._done

    @torch.no_grad()
    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """[all] Copy the root's tensors to all ranks."""
        mine = self._index == opts.rootRank
        self._memory.publish(tensors if mine else ())
        for offset, tensor in zip(layout(tensors)[0], () if mine else tensors, strict=mine is False):
            tensor.copy_(self._memory.read(opts.rootRank, offset, tensor))
        return self._done

    @torch.no_grad()
    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> dist.Work:
        """[all] Receive the root's tensor for this rank."""
        self._memory.publish(input_tensors[0] if self._index == opts.rootRank else ())
        output = output_tensors[0]
        offsets, _ = layout([output] * self._count)
        output.copy_(self._memory.read(opts.rootRank, offsets[self._index], output))
        return self._done

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """[all] Reduce by sum, or by `opts.reduceOp`."""
        return self._reduce(tensors, opts.reduceOp if opts is not None else ReduceOp.SUM)

    allreduce_coalesced = allreduce

    @torch.no_grad()
    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """[all] Reduce on the root alone."""
        return self._reduce(tensors, opts.reduceOp, opts.rootRank)

    @torch.no_grad()
    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """[all] Sum the ranks' tensors for this rank."""
        op = opts.reduceOp if opts is not None else ReduceOp.SUM
        for output, inputs in zip(output_tensors, input_tensors, strict=True):
            own = inputs[self._index]
            # The output may alias this rank's input, which must survive until it is added in rank order.
            if own.data_ptr() == output.data_ptr():
                own = own.clone()
            self._memory.publish([*inputs[: self._index], *inputs[self._index + 1 :]])
            offsets, _ = layout([output] * self._count)
            parts = [own] * self._count
            for peer in self._peers:
                parts[peer] = self._memory.read(peer, offsets[self._index - (peer < self._index)], output)
            combine(parts, op, output)
        return self._done

    @torch.no_grad()
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """[all] Sum the ranks' parts for this rank out of one tensor."""
        parts = [part.view_as(output) for part in input.contiguous().view(self._count, -1)]
        return self.reduce_scatter([output], [parts], opts)

    @torch.no_grad()
    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """[all] Receive from each rank its tensor for this one."""
        # Ranks may send different sizes, so the offsets travel in front of the tensors.
        begins = torch.tensor(layout(input_tensors)[0])
        _, head = layout([begins])
        self._memory.publish([begins, *input_tensors])
        for peer, output in enumerate(output_tensors):
            begin = int(self._memory.read(peer, 0, begins)[self._index])
            output.copy_(self._memory.read(peer, head + begin, output))
        return self._done

    @torch.no_grad()
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """[all] Exchange rows between all ranks, out of one tensor and into one."""
        parts = input.split(list(input_sizes)) if input_sizes else input.chunk(self._count)
        with _Contiguous(output) as whole:
            outputs = whole.split(list(output_sizes)) if output_sizes else whole.chunk(self._count)
            return self.alltoall(list(outputs), list(parts))

    def barrier(self, opts: Any = None) -> dist.Work:
        """[all] Wait for all ranks."""
        self._memory.publish(())
        return self._done

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """[all] Gather several tensors at once."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return self._done

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """[all] Reduce and scatter several tensors."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return self._done

    # Names by which torch before 2.13 calls the methods.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        """Release the memory without meeting other ranks."""
        self._memory.close()

    def size(self) -> int:
        """Return the group's number of ranks."""
        return self._count

    def rank(self) -> int:
        """Return this rank's group index."""
        return self._index

    def getBackendName(self) -> str:
        """Return the backend's registered name."""
        return NAME

    @property
    def group_name(self) -> str:
        """Name of the group within the job."""
        return self._name

    def getGroupName(self) -> str:
        """Return the group's name to torch's C++ code."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        pass

    def _get_backend(self, device: torch.device) -> "SharedGroup":
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: no memory for callers."""
        return False

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        self._memory.publish([tensor])
        for peer, output in enumerate(outputs):
            if peer != self._index:
                output.copy_(self._memory.read(peer, 0, output))
            elif output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)

    def _reduce(self, tensors: list[Tensor], op: ReduceOp, root: int | None = None) -> dist.Work:
        self._memory.publish(tensors)
        if root in (None, self._index):
            for offset, tensor in zip(layout(tensors)[0], tensors, strict=True):
                combine([self._memory.read(peer, offset, tensor) for peer in range(self._count)], op, tensor)
        return self._done


class _Contiguous:
    """A contiguous tensor to write, copied to the given one on exit."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._written = tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()

    def __enter__(self) -> Tensor:
        return self._written

    def __exit__(self, *_: object) -> None:
        if self._written is not self._tensor:
            self._tensor.copy_(self._written)


_COMBINE: dict[Any, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def combine(parts: Sequence[Tensor], op: ReduceOp, out: Tensor) -> None:
    """Write the parts' sum (or mean, product, ...), in order, to `out`, which aliases none."""
    apply = next((function for known, function in _COMBINE.items() if op == known), None)
    if apply is None:
        raise NotImplementedError(f"the {NAME} backend knows no {op}")
    # One rounding at the end: adding in bfloat16 would round after each rank.
    narrow = out.dtype in (torch.bfloat16, torch.float16)
    total = torch.empty_like(out, dtype=torch.float32) if narrow else out
    total.copy_(parts[0])
    for part in parts[1:]:
        apply(total, part, out=total)
    if op == ReduceOp.AVG:
        total /= len(parts)
    if narrow:
        out.copy_(total)


dist.Backend.register_backend(NAME, SharedGroup, devices=["cpu"])
