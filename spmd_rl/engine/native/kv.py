"""Paged KV cache: blocks of `BLOCK` tokens with reference counts, in a fixed pool.

A request's *table* lists its blocks; token t is in slot `table[t // BLOCK] * BLOCK + t % BLOCK`. A full block is cached
under a hash of all tokens up to its end, and shared by requests with that prefix: a group's answers, an agent's next
turn. Unreferenced blocks are evicted least recently used first.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

# Each request recomputes the tokens of a shared prompt beyond full blocks.
BLOCK = 4


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks for these tokens."""
    return -(-num_tokens // BLOCK)


def block_keys(token_ids: array, cache: str = "") -> list[bytes]:
    """Return a key per full block of these tokens ('i'): 16 bytes of blake2b over the previous key, at first the
    cache's name, and the block's tokens."""
    data, size = token_ids.tobytes(), BLOCK * token_ids.itemsize
    keys = [cache.encode()]
    for end in range(size, len(data) + 1, size):
        keys.append(blake2b(keys[-1] + data[end - size : end], digest_size=16).digest())
    return keys[1:]


class KVPool:
    """Keys and values of all layers, reference counts, and the cache."""

    def __init__(
        self, num_layers: int, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_tokens // BLOCK
        self.peak = 0
        """Most blocks ever in use at once"""
        self.data: Tensor
        """[2, num_layers, num_blocks + 1, BLOCK, num_heads, head_dim]: keys and values, the last block for padding;
        empty while asleep"""
        self._shape = (2, num_layers, self.num_blocks + 1, BLOCK, num_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._references = [0] * self.num_blocks
        self._free: list[int] = []
        # Cached blocks without references, the least recently used first.
        self._unused: dict[int, None] = {}
        self._keys: dict[int, bytes] = {}
        self._cached: dict[bytes, int] = {}
        self.wake()

    def wake(self) -> None:
        """Allocate the empty pool's memory."""
        self.data = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._num_clean = 0
        self.forget()

    def sleep(self) -> None:
        """Free the memory; no block may be in use."""
        assert not any(self._references), "KV blocks in use"
        self.forget()
        self.data = torch.empty(0, dtype=self._dtype, device=self._device)

    def forget(self) -> None:
        """Drop the cache, which is of other weights; blocks in use stay."""
        free = [block for block in range(self.num_blocks) if not self._references[block]]
        # A stack with the lowest block on top, so that memory pages are touched late.
        self._free = free[::-1]
        self._unused.clear()
        self._keys.clear()
        self._cached.clear()

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, including cached ones."""
        return len(self._free) + len(self._unused)

    @property
    def num_used(self) -> int:
        """Number of blocks with references."""
        return self.num_blocks - self.num_free

    def take(self, num_blocks: int) -> list[int]:
        """Return blocks to write into, each with one reference."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked for, {self.num_free} free"
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._references[block] = 1
        self._clean(max(blocks, default=-1) + 1)
        self.peak = max(self.peak, self.num_used)
        return blocks

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the first keys, up to a missing one, each with one more reference."""
        blocks = []
        for key in keys:
            if (block := self._cached.get(key)) is None:
                break
            self._unused.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        self.peak = max(self.peak, self.num_used)
        return blocks

    def keep(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Cache the first blocks under these keys, except keys of other blocks."""
        for key, block in zip(keys, blocks, strict=False):
            if self._cached.setdefault(key, block) == block:
                self._keys[block] = key

    def drop(self, blocks: list[int]) -> None:
        """Drop one reference each; of free blocks the last ones are reused first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] > 0:
                continue
            if block in self._keys:
                self._unused[block] = None
            else:
                self._free.append(block)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, num_heads, head_dim] at slots int64 [T]."""
        for part, new in zip(self.data[:, layer], (keys, values), strict=True):
            part.flatten(0, 1).index_copy_(0, slots, new)

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of tables int64 [R, N]: each [R, num_heads, N * BLOCK, head_dim]."""
        rows, width = tables.shape
        flat = tables.flatten()
        keys, values = (part.index_select(0, flat) for part in self.data[:, layer])
        shape = (rows, width * BLOCK, *keys.shape[-2:])
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)

    def _evict(self) -> int:
        block = next(iter(self._unused))
        del self._unused[block], self._cached[self._keys.pop(block)]
        return block

    def _clean(self, end: int) -> None:
        # Slots not written yet are masked, but a NaN in fresh memory would survive the mask (0 * NaN).
        if end > self._num_clean:
            self.data[:, :, self._num_clean : end] = 0
            self._num_clean = end
