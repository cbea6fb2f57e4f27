"""The paged KV cache: blocks of `BLOCK` tokens, counted references, and never a token beyond the pool.

A request's *table* lists its blocks in order; token t lies in slot `table[t // BLOCK] * BLOCK + t % BLOCK`. Full blocks
of a shared prompt stand in many tables and are freed with the last. Left out: who gets blocks (`scheduler.py`).
"""

import torch
from torch import Tensor

BLOCK = 16
"""Tokens per block: small enough to waste little, large enough to gather a table in few long copies."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK)


class KVPool:
    """Keys and values of all layers, and which blocks are in use."""

    def __init__(
        self, num_layers: int, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_tokens // BLOCK
        self.peak = 0
        """Most blocks ever in use at once."""
        self._shape = (2, num_layers, self.num_blocks, BLOCK, num_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._free = list(reversed(range(self.num_blocks)))  # a stack, lowest block on top: pages are touched late
        self._references = [0] * self.num_blocks
        self.wake()

    def wake(self) -> None:
        """Allocate the memory, empty."""
        self._data = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._num_clean = 0

    def sleep(self) -> None:
        """Free the memory. Nothing may be in use."""
        assert self.num_used == 0, "KV blocks in use"
        self._data = torch.empty(0, dtype=self._dtype, device=self._device)

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """So many free blocks, each with one reference."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks asked for, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._references[block] = 1
        self._clean(max(blocks, default=-1) + 1)
        self.peak = max(self.peak, self.num_used)
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """One more reference to each of these blocks."""
        for block in blocks:
            assert self._references[block] > 0
            self._references[block] += 1
        return blocks

    def drop(self, blocks: list[int]) -> None:
        """One reference less; blocks without any are free again."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                self._free.append(block)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks, in all layers."""
        self._data[:, :, targets] = self._data[:, :, sources]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, num_heads, head_dim] at slots int64 [T]."""
        for part, new in zip(self._data[:, layer], (keys, values), strict=True):
            part.flatten(0, 1).index_copy_(0, slots, new)

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tables int64 [R, N]: each [R, num_heads, N * BLOCK, head_dim]."""
        rows, width = tables.shape
        flat = tables.flatten()
        keys, values = (part.index_select(0, flat) for part in self._data[:, layer])
        shape = (rows, width * BLOCK, *keys.shape[-2:])
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)

    def _clean(self, end: int) -> None:
        # Slots not written yet are masked, but a NaN in fresh memory would survive the mask (0 * NaN).
        if end > self._num_clean:
            self._data[:, :, self._num_clean : end] = 0
            self._num_clean = end
