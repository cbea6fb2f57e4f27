"""`fingerprint`: a hash of a tensor's bytes at reading speed, against mistakes, not attacks."""

import ctypes
import struct
from collections.abc import Mapping
from functools import cache

import torch
import xxhash
from torch import Tensor

WORDS = 2**22
"""64-bit words hashed at a time on an accelerator: temporaries of 32 MiB"""

GOLDEN, FIRST, SECOND = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of splitmix64's finaliser, as signed words"""


def fingerprint(tensor: Tensor) -> bytes:
    """Return 16 bytes that depend on every bit and its position.

    Strides do not matter. On the CPU it is xxh3-128, elsewhere `checksum`: comparable only between tensors on one
    device type.
    """
    return finish({"": start(tensor)})[""]


def start(tensor: Tensor) -> bytes | Tensor:
    """Return a tensor's fingerprint; on an accelerator the input of `finish`, without synchronisation."""
    if tensor.is_cpu:
        data = tensor.contiguous()
        # Not `data.numpy()`: that makes the storage unresizable for good, and FSDP frees its buffers by resizing them.
        return xxhash.xxh3_128_digest(_bytes(data.nbytes).from_address(data.data_ptr()))
    return _sums(tensor.detach().contiguous().view(-1).view(torch.uint8))


def finish(started: Mapping[str, bytes | Tensor]) -> dict[str, bytes]:
    """Return the fingerprints by name, with one synchronisation."""
    waiting = {name: sums for name, sums in started.items() if isinstance(sums, Tensor)}
    rows = torch.stack(list(waiting.values())).tolist() if waiting else []
    found = {name: struct.pack("<qq", *row) for name, row in zip(waiting, rows, strict=True)}
    return {name: found.get(name, value) for name, value in started.items()}


@cache
def _bytes(count: int) -> type[ctypes.Array]:
    # Making the type takes longer than a small hash.
    return ctypes.c_char * count


def checksum(data: Tensor) -> bytes:
    """Return 16 bytes for uint8 [N], on its device: two sums of its 64-bit words, each mixed with its position."""
    # The mixing is splitmix64's finaliser, in wrapping int64. Without it (a plain weighted sum) two flipped sign bits
    # would cancel, as the top bit of a word has nowhere to carry to.
    return finish({"": _sums(data)})[""]


def _sums(data: Tensor) -> Tensor:
    num_whole = data.numel() // 8 * 8
    parts = list(data[:num_whole].split(8 * WORDS))
    # A model has hundreds of small tensors, for which starting a kernel takes longer than its work: no empty last word.
    if num_whole < data.numel():
        parts.append(torch.nn.functional.pad(data[num_whole:], (0, 8 - data.numel() % 8)))
    aligned = data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0
    totals, place = torch.zeros(2, dtype=torch.int64, device=data.device), 0
    for part in parts:
        words = (part if aligned else part.clone()).view(torch.int64)
        places = torch.arange(place, place + len(words), device=data.device)
        place += len(words)
        mixed = _shift_multiply(words ^ (places * GOLDEN), 30, FIRST)
        mixed = _shift_multiply(mixed, 27, SECOND)
        totals += torch.stack([mixed.sum(), _shift_multiply(mixed, 31, GOLDEN).sum()])
    return totals


def _shift_multiply(words: Tensor, shift: int, factor: int) -> Tensor:
    return (words ^ (words >> shift)).mul_(factor)
