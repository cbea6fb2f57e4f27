"""`Offload`: tensors that move between the device's memory and host memory, which is reserved once.

    weights = Offload(model.parameters())
    weights.to_host(); ...; weights.to_device()

The storage under a tensor is freed and made anew; tensor objects, and whatever refers to them (FSDP, the optimizer),
stay what they are. Nothing may read them meanwhile. On an accelerator the host copy is pinned, copies are asynchronous
on the current stream, and only `to_host` waits, once, before it frees. Copies do not overlap with computing.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from spmd_rl.train.fsdp2.shard import local


class Offload:
    """The storages under some tensors; of a DTensor, under this rank's shard."""

    def __init__(self, tensors: Iterable[Tensor], constant: bool = False) -> None:
        """Take tensors that are on their device now; `constant` ones never change and are copied to the host once."""
        found = {storage._cdata: storage for tensor in tensors if (storage := local(tensor).untyped_storage()).nbytes()}
        self._storages, self._constant = list(found.values()), constant
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._copies: list[Tensor] = []
        self._on_host = False

    def to_host(self) -> None:
        """Copy to the host and free the device's memory; does nothing if they are on the host."""
        if self._on_host:
            return
        on_device = torch.accelerator.is_available()
        first = not self._copies
        if first:
            self._copies = [torch.empty(size, dtype=torch.uint8, pin_memory=on_device) for size in self._sizes]
        if first or not self._constant:
            for copy, storage in zip(self._copies, self._storages, strict=True):
                copy.copy_(_bytes(storage), non_blocking=True)
        if on_device:
            torch.accelerator.synchronize()  # the copies, and whatever other streams still read
        for storage in self._storages:
            storage.resize_(0)
        self._on_host = True

    def to_device(self) -> None:
        """Allocate and copy from the host; does nothing if they are on the device. Later work waits on the stream."""
        if not self._on_host:
            return
        for copy, storage, size in zip(self._copies, self._storages, self._sizes, strict=True):
            storage.resize_(size)
            _bytes(storage).copy_(copy, non_blocking=True)
        self._on_host = False


def _bytes(storage: UntypedStorage) -> Tensor:
    """uint8, all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
