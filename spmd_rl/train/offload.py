"""`Offload`: tensors that move between device memory and host memory, which is reserved once.

    weights = Offload(model.parameters())
    weights.to_host(); ...; weights.to_device()

Tensor objects stay valid (in FSDP, the optimizer) but must not be read while offloaded. Accelerators copy
asynchronously on the current stream; only `to_host` waits, once, before it frees.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from spmd_rl.model.load import local

# torch rounds pinned allocations up to powers of two, which would take up to twice the size of one large block.
BLOCK_BYTES = 2**26


class Offload:
    """Storages of some tensors; of a DTensor, its shard."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {storage._cdata: storage for tensor in tensors if (storage := local(tensor).untyped_storage()).nbytes()}
        self._storages = list(found.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._blocks: list[Tensor] = []
        self._on_host, self._changed = False, True

    def changed(self) -> None:
        """Mark as changed; otherwise the next `to_host` copies nothing."""
        self._changed = True

    def to_host(self) -> None:
        """Copy to the host, if changed, and free device memory."""
        if self._on_host:
            return
        on_device = torch.accelerator.is_available()
        if not self._blocks:
            total = sum(self._sizes)
            sizes = [min(BLOCK_BYTES, total - begin) for begin in range(0, total, BLOCK_BYTES)]
            # Only copies to and from pinned memory are asynchronous.
            self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=on_device) for size in sizes]
        if self._changed:
            for host, device in self._pieces():
                host.copy_(device, non_blocking=True)
        if on_device:
            # Wait for the copies, and for other streams that still read the storage.
            torch.accelerator.synchronize()
        for storage in self._storages:
            # Frees the memory, while tensors keep referring to the storage.
            storage.resize_(0)
        self._on_host, self._changed = True, False

    def to_device(self) -> None:
        """Allocate, and copy from the host without blocking: later work on the stream sees the copies."""
        if not self._on_host:
            return
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        for host, device in self._pieces():
            device.copy_(host, non_blocking=True)
        self._on_host = False

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield equal bytes on host and device, uint8 [n] each."""
        place = 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            data, done = _bytes(storage), 0
            while done < size:
                block, at = divmod(place, BLOCK_BYTES)
                count = min(size - done, BLOCK_BYTES - at)
                yield self._blocks[block][at : at + count], data[done : done + count]
                place, done = place + count, done + count


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
