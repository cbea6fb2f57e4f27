"""`FakeDeviceMode`: tensors on a rank's device are fake, those on its host are real.

Tensors that the device would compute (floating, and what derives from them) have no memory; token ids, positions and
lengths of the batch, made and read on the host, are real. Three results of the device are assumed:

* a number that is read back from the device is 1 (a loss, a norm), and a flag of one byte is 0 (an overflow);
* the experts of a mixture get equally many tokens;
* data from other ranks equals this rank's, and is counted (`Traffic`).
"""

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
META = torch.device("meta")
INTEGERS = ("arange", "randint", "randperm")
KINDS = {
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}


class FakeDeviceMode(TorchDispatchMode):
    """A mode to enter before a `MemoryTracker`."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._patches = ExitStack()
        self.received: tuple[int, ...] = ()
        """Integers in messages: the shape of hidden states that follow"""
        self.meeting = ""
        self.travelled: Counter[tuple[str, str]] = Counter()
        """Bytes arriving at this rank, by collective and kind"""

    def __enter__(self) -> "FakeDeviceMode":
        self._patches.enter_context(patch.object(torch.utils, "swap_tensors", _swapped))
        self._patches.enter_context(warnings.catch_warnings())
        # Libraries check the alignment of their buffers.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._meet(func, args)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not (any(map(_is_fake, tensors)) if tensors else _makes_floats(func, kwargs)):
            return func(*args, **kwargs)
        if tensors and all(tensor.is_meta for tensor in tensors) and kwargs.get("device") in (None, META):
            # Operations on a model that is still to be sharded: many, and quick on the meta device.
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 1.0 if dtype.is_floating_point else int(dtype.itemsize > 1)
        if func is aten.bincount.default:
            return _even(args[0].numel(), args[2] if len(args) > 2 else kwargs["minlength"])
        if func is aten.topk.default:
            with self._fake:
                values, _ = func(*args, **kwargs)
            return values, _dealt(values.shape, args[0].shape[-1])
        if func is aten.scatter.value and not args[0].is_floating_point() and not _is_fake(args[2]):
            return func(torch.zeros(args[0].shape, dtype=args[0].dtype), *args[1:])
        if func is aten.masked_select.default:
            func, args = aten.index.Tensor, (args[0], [args[1]])
        if func in (aten.index.Tensor, aten.index_put_.default):
            args = (args[0], _without_masks(args[1]), *args[2:])
        with self._fake:
            return func(*args, **kwargs)

    def _meet(self, func: Any, args: Any) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        found = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        size = ProcessGroup.unbox(found).size()
        given = [[t for t in tree_leaves(arg) if isinstance(t, Tensor)] for arg in args]
        out, source = given[0], given[1] if len(given) > 1 and given[1] else given[0]
        self._count(name, max(_bytes(out), _bytes(source)), size)
        if name == "recv_" and not _is_fake(out[0]):
            out[0].copy_(torch.tensor(self.received))
        elif not any(map(_is_fake, (*out, *source))):
            for target, piece in zip(out, source * len(out), strict=False):
                if target is not piece and piece.numel() and target.numel() % piece.numel() == 0:
                    target.view(-1, piece.numel()).copy_(piece.reshape(1, -1))
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _count(self, name: str, num_bytes: int, size: int) -> None:
        kind = next((said for part, said in KINDS.items() if part in name), None)
        if kind is None or size == 1:
            # A barrier sends nothing.
            return
        whole = kind in ("send", "receive", "broadcast")
        # Ring algorithms: an all-reduce is a reduce-scatter and an all-gather of (n - 1) / n of the bytes each.
        times = 1 if whole else (size - 1) / size * (2 if kind == "all-reduce" else 1)
        self.travelled[self.meeting, kind] += int(times * num_bytes)


def _swapped(one: Tensor, other: Tensor, swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors) -> None:
    # `Module.to` swaps fake parameters even in their place, and cannot where a library refers to them.
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        swap(one, other)


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _makes_floats(func: Any, kwargs: Any) -> bool:
    if kwargs.get("device") == META:
        return False
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype.is_floating_point
    return not any(name in func.name() for name in INTEGERS)


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Return indices with the places that each mask chooses, whose number a fake mask would not have."""
    masks = [one is not None and one.dtype == torch.bool and not _is_fake(one) for one in indices]
    places = (one.nonzero(as_tuple=True) if mask else (one,) for one, mask in zip(indices, masks, strict=True))
    return [*chain.from_iterable(places)]


def _dealt(shape: torch.Size, num_places: int) -> Tensor:
    # Places in turn, each equally often.
    return (torch.arange(shape.numel()) % num_places).view(shape)


def _even(count: int, num_places: int) -> Tensor:
    """Return int64 [num_places]: `count` divided as evenly as possible."""
    counts = torch.full((num_places,), count // num_places, dtype=torch.int64)
    counts[: count % num_places] += 1
    return counts


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
