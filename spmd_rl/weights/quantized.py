"""Low-precision rollouts: weights on their way to an engine, rounded for it.

    weights = quantized(policy.weights(), "fp8")

`fp8`, `int8` and `int4` are simulated: values are rounded, and the dtype stays. So every engine, hash and transport
works unchanged, and low precision's effect on training shows on any device; activations are not rounded. `w8a8_int8`
and `w8a8_fp8` are real: 8-bit tensors and scales (`model/low_precision.py`).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spmd_rl.model.low_precision import W8A8, by_rows, is_rounded, nonzero

BLOCK, GROUP = 128, 32
"""Side of an FP8 block, as in DeepSeek-V3; weights of a row that share a scale in INT4"""


def fp8(weight: Tensor) -> Tensor:
    """Return a weight [rows, columns] rounded to float8 e4m3, a scale per `BLOCK` x `BLOCK`, in its dtype."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [blocks, rows, blocks, columns]
    scale = nonzero(blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max)
    found = (blocks / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
    return found.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def int8(weight: Tensor) -> Tensor:
    """Return a weight [rows, columns] rounded to 127 symmetric steps of a row's scale, in its dtype."""
    scale = nonzero(weight.abs().amax(1, keepdim=True) / 127)
    return (weight / scale).round() * scale


def int4(weight: Tensor) -> Tensor:
    """Return a weight [rows, columns] rounded to 7 symmetric steps of a scale per `GROUP` of a row, in its dtype."""
    columns = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -columns % GROUP)).unflatten(1, (-1, GROUP))
    scale = nonzero(groups.abs().amax(2, keepdim=True) / 7)
    return ((groups / scale).round() * scale).flatten(1)[:, :columns]


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {"fp8": fp8, "int8": int8, "int4": int4}


def quantized(weights: Iterator[tuple[str, Tensor]], name: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, layers' matrices rounded to the format `name`, or in it; computed in float32."""
    if name in W8A8:
        yield from by_rows(weights, name)
        return
    for key, tensor in weights:
        if name is not None and is_rounded(key, tensor.ndim):
            tensor = FORMATS[name](tensor.detach().float()).to(tensor.dtype).contiguous()
        yield key, tensor
