"""`fingerprint`: a checksum of a tensor's bytes at reading speed, for mistakes, not attacks; equal on all devices."""

# Rows and columns of blocks of words of 64 bits are summed, modulo 2^64, and the sums hashed on the host. Up to three
# changed words are always noticed, and an exchange of two elements. Unnoticed are changes that cancel in each row and
# column: at the corners of a rectangle d, -d, d, -d, or the top bits (signs) of all four. Exchanged rows, blocks or
# tensors, and shifts, are noticed unless sums are equal: of dense random values by a chance of 2^-64, of identities and
# permutations often.

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

# An odd number of rows: signs that change in each row of a tensor do not cancel.
ROWS, WORDS = 255, 256
"""Rows of a block; words of a row"""
# Bytes of a tensor that is hashed whole on the host.
WHOLE = 2**15
# Bytes of sums on a device, of a GiB of weights, for which it is waited once.
PENDING = 2**23


class Fingerprints:
    """Fingerprints of tensors by name."""

    def __init__(self) -> None:
        self._done: dict[str, bytes] = {}
        self._pending: dict[str, Tensor] = {}
        self._num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Read a tensor, which may change afterwards."""
        sums = self._pending[name] = _sums(tensor)
        self._num_bytes += sums.nbytes
        if self._num_bytes >= PENDING:
            self.finish()

    def finish(self) -> dict[str, bytes]:
        """Return 16 bytes by name, in order; waits for the device."""
        pending, self._pending, self._num_bytes = self._pending, {}, 0
        self._done |= dict.fromkeys(pending, b"")
        for device in {sums.device for sums in pending.values()}:
            own = {name: sums for name, sums in pending.items() if sums.device == device}
            copied = torch.cat(list(own.values())).cpu().split([sums.nbytes for sums in own.values()])
            self._done |= {name: _hash(sums) for name, sums in zip(own, copied, strict=True)}
        return self._done


def fingerprint(tensor: Tensor) -> bytes:
    """Return 16 bytes that depend on every bit and its position, not on strides."""
    return _hash(_sums(tensor).cpu())


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, bytes]:
    """Return fingerprints by name, in order."""
    found = Fingerprints()
    for name, tensor in tensors:
        found.add(name, tensor)
    return found.finish()


def _sums(tensor: Tensor) -> Tensor:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() <= WHOLE:
        return data.clone()
    num_rows = data.numel() // (8 * WORDS)
    # The last block has an odd number of rows too; what is left over is hashed as it is.
    num_rows -= num_rows % ROWS in range(2, ROWS, 2)
    inside = num_rows * 8 * WORDS
    aligned = data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0
    # int64, although the sums wrap: of narrower words `sum` would make a copy as int64 first.
    rows = (data if aligned else data.clone())[:inside].view(torch.int64).view(-1, WORDS)
    num_whole = len(rows) // ROWS * ROWS
    blocks = [rows[:num_whole].view(-1, ROWS, WORDS), rows[None, num_whole:]]
    sums = [block.sum(dim) for block in blocks if block.numel() for dim in (2, 1)]
    return torch.cat([*(each.view(-1).view(torch.uint8) for each in sums), data[inside:]])


def _hash(sums: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(sums.numpy())
