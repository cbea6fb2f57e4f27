"""`dither`: master weights at random points of their rounding intervals, so that small steps are not lost.

A bfloat16 checkpoint's masters start mid-interval, and a rounded weight changes only once its master has moved half an
interval: a first step of 3e-5 changes none above 0.015. A constant random offset per master leaves the rounded model as
it is and lets it follow without bias (non-subtractive dither: Wannamaker et al., IEEE Transactions on Signal Processing
48, 2000).
"""

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from spmd_rl.model.load import Region, local, owned_region
from spmd_rl.model.lora import Adapter

CHUNK = 2**22


@torch.no_grad()
def dither(model: nn.Module, dtype: torch.dtype) -> None:
    """Add an offset that rounding to `dtype` removes to trained weights that `dtype` represents exactly.

    It depends on name and index in the whole tensor, so it is equal in every layout.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            dither_region(local(parameter), name, parameter.shape, owned_region(parameter), dtype)


@torch.no_grad()
def dither_region(part: Tensor, name: str, shape: Sequence[int], region: Region, dtype: torch.dtype) -> None:
    """Dither `part`, contiguous, the `region` of the weight `name` of whole shape `shape`."""
    if not part.numel() or part.dtype.itemsize <= dtype.itemsize:
        return
    places = _places(shape, region, part.device, (zlib.crc32(name.encode()) & 0x7FFFFFFF) << 32)
    for begin in range(0, part.numel(), CHUNK):
        piece = part.view(-1)[begin : begin + CHUNK]
        piece.copy_(_dithered(piece, dtype, places(begin, len(piece))))


def merged(adapter: Adapter, weight: Tensor, name: str, num_rows: int, rows: slice = slice(None)) -> Tensor:
    """Return the frozen weight `name`, or some of its rows, merged with its adapter, in its dtype."""
    # The frozen weight is on the grid of its dtype too: a small change by the adapter would be rounded away entirely,
    # and the engine would keep the old weights. With the offset it arrives on average, from the first step.
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    begin, end, _ = rows.indices(num_rows)
    whole = (num_rows, weight.shape[1])
    dither_region(wide, name, whole, (slice(begin, end), slice(0, weight.shape[1])), weight.dtype)
    return adapter.added_to(wide, rows).to(weight.dtype)


def _places(shape: Sequence[int], region: Region, device: torch.device, offset: int) -> Callable[[int, int], Tensor]:
    """Return a function from a region's elements, as (begin, count), to `offset` plus their flat indices in the
    whole."""
    sizes = [part.stop - part.start for part in region]

    def places(begin: int, count: int) -> Tensor:
        left = torch.arange(begin, begin + count, device=device)
        flat, stride = torch.full_like(left, offset), 1
        for part, size, whole in zip(reversed(region), reversed(sizes), reversed(shape), strict=True):
            flat += (left % size + part.start) * stride
            left, stride = left // size, stride * whole
        return flat

    return places


def _dithered(weights: Tensor, dtype: torch.dtype, places: Tensor) -> Tensor:
    """Return weights plus uniform noise over the interval that rounds to them, where `dtype` is exact."""
    rounded = weights.to(dtype)
    spacing = torch.ldexp(torch.ones_like(weights), torch.frexp(weights)[1]) * (torch.finfo(dtype).eps / 2)
    moved = weights + (_uniform(places).to(weights) - 0.5) * spacing
    # Below a power of two the interval is half as wide.
    kept = (rounded.to(weights.dtype) == weights) & (moved.to(dtype) == rounded)
    return torch.where(kept, moved, weights)


def _uniform(counters: Tensor) -> Tensor:
    # MurmurHash3's finalizer of each int64, as float32 in [0, 1).
    bits = counters ^ _high(counters)
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        bits = bits * factor
        bits = bits ^ _high(bits)
    # 24 bits are exact in the mantissa of float32.
    return (bits & 0xFFFFFF).float() / 2**24


def _high(bits: Tensor) -> Tensor:
    return bits >> 33 & 0x7FFFFFFF
