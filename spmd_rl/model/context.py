"""Context parallelism: ranks of a group split a packed row's tokens, and compute attention together.

    context = context_of(group, num_heads=32, num_kv_heads=8)
    mine = context.tokens(num_tokens)                  # which tokens of the row this rank computes
    packing = context.packing(starts, parents, device, dtype)

`Ulysses` (Jacobs et al., arXiv 2309.14509), used if heads divide, exchanges tokens for heads. `GatherKeys` (Llama 3,
arXiv 2407.21783) gathers keys and values, for any number of heads. Both work on trees of segments. A ring would save
only one layer's keys.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.model.attention import Packing, Share
from spmd_rl.model.differentiable import exchange_parts, gather_rows


class ContextParallel(Protocol):
    """Split of a row over ranks; its tokens must be a multiple of `granule`."""

    granule: int

    def tokens(self, num_tokens: int, rank: int | None = None) -> Tensor:
        """Return a rank's tokens of a row (default: this rank's), in order: int64 [num_tokens / size]."""
        ...

    def packing(self, starts: Tensor, parents: Tensor, device: torch.device, dtype: torch.dtype) -> Packing:
        """Return the packing for this rank's attention; see `Packing.of`."""
        ...


def context_of(group: dist.ProcessGroup, num_heads: int, num_kv_heads: int) -> ContextParallel:
    """Return `Ulysses` if this rank's heads divide, else `GatherKeys`."""
    size = group.size()
    return Ulysses(group) if num_heads % size == 0 and num_kv_heads % size == 0 else GatherKeys(group)


class Ulysses:
    """A span of the row per rank; attention over all of it with a share of heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size, self._rank = group, group.size(), group.rank()
        self.granule = self._size

    def tokens(self, num_tokens: int, rank: int | None = None) -> Tensor:
        """Return a rank's tokens, see `ContextParallel`."""
        run, place = num_tokens // self._size, self._rank if rank is None else rank
        return torch.arange(place * run, (place + 1) * run)

    def packing(self, starts: Tensor, parents: Tensor, device: torch.device, dtype: torch.dtype) -> Packing:
        """Return this rank's packing, see `ContextParallel`."""
        return Packing.of(starts, parents, device, dtype, exchange=self)

    def before(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[all] Exchange tokens for heads, see `HeadExchange`."""
        return self._to_heads(q), self._to_heads(k), self._to_heads(v)

    def after(self, out: Tensor) -> Tensor:
        """[all] Exchange heads for tokens: [T, H / size, D] -> [T / size, H, D]."""
        received = exchange_parts(out.unflatten(0, (self._size, -1)), self._group)
        return received.transpose(0, 1).flatten(1, 2)

    def _to_heads(self, x: Tensor) -> Tensor:
        """[T / size, H, D] -> [T, H / size, D]."""
        return exchange_parts(x.unflatten(1, (self._size, -1)).transpose(0, 1), self._group).flatten(0, 1)


class GatherKeys:
    """An early and a late chunk of the row per rank; all keys and values."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size, self._rank = group, group.size(), group.rank()
        self.granule = 2 * self._size

    def tokens(self, num_tokens: int, rank: int | None = None) -> Tensor:
        """Return a rank's tokens, see `ContextParallel`."""
        return torch.cat([torch.arange(c.start, c.stop) for c in self._chunks(num_tokens, rank)])

    def packing(self, starts: Tensor, parents: Tensor, device: torch.device, dtype: torch.dtype) -> Packing:
        """Return this rank's packing, see `ContextParallel`."""
        total = int(starts[-1])
        gathered = torch.cat([self.tokens(total, rank) for rank in range(self._size)])
        share = Share(self._chunks(total), torch.argsort(gathered))
        return Packing.of(starts, parents, device, dtype, exchange=self, share=share)

    def before(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[all] Gather all ranks' keys and values, see `HeadExchange`."""
        keys, values = gather_rows(torch.stack([k, v], 1), self._group).unbind(1)
        return q, keys, values

    def after(self, out: Tensor) -> Tensor:
        """Return outputs unchanged: queries were never exchanged."""
        return out

    def _chunks(self, num_tokens: int, rank: int | None = None) -> tuple[range, range]:
        place = self._rank if rank is None else rank
        length = num_tokens // self.granule
        early, late = place * length, (self.granule - 1 - place) * length
        return range(early, early + length), range(late, late + length)
