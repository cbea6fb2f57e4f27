"""Low-precision rollouts, simulated: weights rounded as an engine in FP8, INT8 or INT4 would hold them, on their way.

    weights = quantized(policy.weights(), "fp8")

What an engine gets has the dtype that it had, and values that the format has: so every engine, hash and transport stays
as it is, and what low precision does to training can be seen without a device that computes in it. Activations are not
rounded, and nothing gets faster or smaller. Of the matrices of the layers alone: embeddings, output, norms, biases and
routers stay as they are.
"""

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BLOCK, GROUP = 128, 32
"""Side of a block of FP8, as DeepSeek-V3 has it; weights of a row that share a scale in INT4"""
OF_LAYERS = re.compile(r"(?!.*\.lora_)(.*\.\d+\..*(?<!\.gate)\.weight|.*\.\d+\..*_proj)$")


def fp8(weight: Tensor) -> Tensor:
    """[rows, columns] in float8 e4m3 with a scale for each block of `BLOCK` x `BLOCK`."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [blocks, rows, blocks, columns]
    scale = _nonzero(blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max)
    found = (blocks / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
    return found.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def int8(weight: Tensor) -> Tensor:
    """[rows, columns] in whole numbers up to 127 with a scale for each row: symmetric, per output channel."""
    scale = _nonzero(weight.abs().amax(1, keepdim=True) / 127)
    return (weight / scale).round() * scale


def int4(weight: Tensor) -> Tensor:
    """[rows, columns] in whole numbers up to 7 with a scale for each `GROUP` of a row: symmetric."""
    columns = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -columns % GROUP)).unflatten(1, (-1, GROUP))
    scale = _nonzero(groups.abs().amax(2, keepdim=True) / 7)
    return ((groups / scale).round() * scale).flatten(1)[:, :columns]


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {"fp8": fp8, "int8": int8, "int4": int4}


def quantized(weights: Iterator[tuple[str, Tensor]], name: str | None) -> Iterator[tuple[str, Tensor]]:
    """The weights, those of the layers' matrices with values that the format `name` has; computed in float32."""
    for key, tensor in weights:
        if name is not None and tensor.ndim == 2 and tensor.is_floating_point() and OF_LAYERS.match(key):
            tensor = FORMATS[name](tensor.detach().float()).to(tensor.dtype).contiguous()
        yield key, tensor


def _nonzero(scale: Tensor) -> Tensor:
    """A scale by which may be divided."""
    return torch.where(scale > 0, scale, 1.0)
