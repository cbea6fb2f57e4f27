"""NF4: frozen matrices under adapters, stored in 4 bits (QLoRA: Dettmers et al., arXiv 2305.14314).

    pack_layer(linear)                          # its weight is bytes from now on, [rows, bytes of a row]
    unpack(pack(weight), columns, dtype)        # the numbers that it computes with

A row of bytes has its numbers, two a byte, then its blocks' bfloat16 factors, so rows are sharded like any parameter's.
A matrix is unpacked for each product, again in the backward pass.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.model.load import RegionReader, local, owned_region
from spmd_rl.model.low_precision import nonzero

BLOCK = 64
"""Neighbours in a row that share a factor"""
CODE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of the 16 codes, equally probable under a normal distribution"""


class Packed(nn.Linear):
    """A frozen linear layer with a packed `weight`."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute with the weight unpacked to `input`'s dtype."""
        out = _Product.apply(input, self.weight, self.in_features)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """`input @ weight.T` that saves only bytes for the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, packed: Tensor, columns: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.columns = columns
        return input @ unpack(packed, columns, input.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return grad @ unpack(packed, ctx.columns, grad.dtype), None, None


@torch.no_grad()
def pack_layer(layer: nn.Linear) -> None:
    """Pack a layer's weight in place; on the meta device only its shape."""
    weight = layer.weight
    shape = (layer.out_features, sum(_sizes(layer.in_features)))
    packed = torch.empty(shape, dtype=torch.uint8, device="meta") if weight.is_meta else pack(weight)
    layer.weight, layer.__class__ = nn.Parameter(packed, requires_grad=False), Packed


def pack(weight: Tensor) -> Tensor:
    """Return [rows, columns] as bytes, [rows, bytes of a row]."""
    blocks = nn.functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    factors = nonzero(blocks.abs().amax(2)).bfloat16()
    code = torch.tensor(CODE, device=weight.device)
    numbers = (
        torch.bucketize(blocks / factors.float()[..., None], (code[1:] + code[:-1]) / 2).to(torch.uint8).flatten(1)
    )
    return torch.cat([numbers[:, ::2] << 4 | numbers[:, 1::2], factors.view(torch.uint8)], 1)


def unpack(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers of packed rows, [rows, columns]."""
    pairs, factors = packed.split(_sizes(columns), 1)
    values = _meanings(packed.device).index_select(0, pairs.int().flatten()).view(len(packed), -1, BLOCK)
    values *= factors.contiguous().view(torch.bfloat16).float()[..., None]
    return values.flatten(1)[:, :columns].to(dtype)


@cache
def _meanings(device: torch.device) -> Tensor:
    return torch.tensor([[CODE[byte >> 4], CODE[byte & 15]] for byte in range(256)], device=device)


def rounded(weight: Tensor) -> Tensor:
    """Return a weight's values after packing."""
    return unpack(pack(weight), weight.shape[1], weight.dtype)


def packing(read: RegionReader, on_progress: Callable[[], object]) -> Callable[[nn.Module], None]:
    """Return a loader of a model whose layers were packed after `read` was made: it reads them whole, then packs."""

    @torch.no_grad()
    def load(model: nn.Module) -> None:
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        for name, plain in read.tensors.items():
            mine, region = local(tensors[name]), owned_region(tensors[name])
            if isinstance(model.get_submodule(name.rpartition(".")[0]), Packed) and name.endswith(".weight"):
                rows, columns = region[0], plain.shape[1]
                part = torch.empty(len(mine), columns, dtype=plain.dtype, device=mine.device)
                read(name, (rows, slice(0, columns)), part)
                mine.copy_(pack(part))
            else:
                read(name, region, mine)
            on_progress()

    return load


def _sizes(columns: int) -> tuple[int, int]:
    blocks = -(-columns // BLOCK)
    return blocks * BLOCK // 2, 2 * blocks
