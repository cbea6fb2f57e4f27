"""Low-precision rollouts: weights on their way to an engine, rounded for it.

    weights = quantized(policy.weights(), "fp8")

`fp8`, `int8` and `int4` are simulated: values are rounded to the format, and the dtype stays. So every engine, hash and
transport works unchanged, and the effect of low precision on training shows without a device that computes in it.
Activations are not rounded, and nothing gets faster or smaller. `w8a8_int8` and `w8a8_fp8` are real: the engine gets
8-bit tensors and their scales (`model/low_precision.py`).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spmd_rl.model.low_precision import W8A8, by_rows, is_rounded, nonzero

BLOCK, GROUP = 128, 32
"""Side of a block of FP8, as DeepSeek-V3 has it; weights of a row that share a scale in INT4"""


def fp8(weight: Tensor) -> Tensor:
    """Return a weight [rows, columns] rounded to float8 e4m3 with a scale for each block of `BLOCK` x `BLOCK`, in its
    dtype."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [blocks, rows, blocks, columns]
    scale = nonzero(blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max)
    found = (blocks / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
    return found.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def int8(weight: Tensor) -> Tensor:
    """Return a weight [rows, columns] rounded to 127 steps of a scale for each row (symmetric, per output channel), in
    its dtype."""
    scale = nonzero(weight.abs().amax(1, keepdim=True) / 127)
    return (weight / scale).round() * scale


def int4(weight: Tensor) -> Tensor:
    """Return a weight [rows, columns] rounded to 7 steps of a scale for each `GROUP` of a row (symmetric), in its
    dtype."""
    columns = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -columns % GROUP)).unflatten(1, (-1, GROUP))
    scale = nonzero(groups.abs().amax(2, keepdim=True) / 7)
    return ((groups / scale).round() * scale).flatten(1)[:, :columns]


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {"fp8": fp8, "int8": int8, "int4": int4}


def quantized(weights: Iterator[tuple[str, Tensor]], name: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, the matrices of layers rounded to the format `name`, or in it; computed in float32."""
    if name in W8A8:
        yield from by_rows(weights, name)
        return
    for key, tensor in weights:
        if name is not None and is_rounded(key, tensor.ndim):
            tensor = FORMATS[name](tensor.detach().float()).to(tensor.dtype).contiguous()
        yield key, tensor
