"""Layers' matrices in INT8 and FP8, quantised by row for W8A8 engines.

    for name, tensor in by_rows(policy.weights(), "w8a8_int8"):  # ..._proj.weight in int8, ..._proj.weight_scale, ...

Embeddings, output, norms, biases and routers do not change.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from spmd_rl.base.errors import UserError

W8A8 = {"w8a8_int8": (torch.int8, 127), "w8a8_fp8": (torch.float8_e4m3fn, 448)}
"""Dtype of weights and its largest number, by `engine.quantization`"""
SCALE = "_scale"
"""Suffix of the name of a weight's row factors, float32 [rows, 1]"""
OF_LAYERS = re.compile(r"(?!.*\.lora_)(.*\.\d+\..*(?<!\.gate)\.weight|.*\.\d+\..*_proj)$")


def is_rounded(name: str, num_dims: int) -> bool:
    """Return True for a matrix of a layer."""
    return num_dims == 2 and OF_LAYERS.match(name) is not None


def by_rows(weights: Iterator[tuple[str, Tensor]], form: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, layers' matrices in the dtype of `form`, each followed by its rows' factors."""
    dtype, largest = W8A8[form]
    for name, tensor in weights:
        if not is_rounded(name, tensor.ndim):
            yield name, tensor
            continue
        weight = tensor.detach().float()
        scale = nonzero(weight.abs().amax(1, keepdim=True) / largest)
        values = (weight / scale).clamp(-largest, largest)
        yield name, (values.round() if dtype == torch.int8 else values).to(dtype)
        yield name + SCALE, scale


def shapes_by_rows(shapes: Mapping[str, torch.Size], form: str) -> dict[str, torch.Size]:
    """Return the shapes of `by_rows`. UserError for stacked experts."""
    found: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        if len(shape) == 3 and OF_LAYERS.match(name):
            raise UserError(f"engine.quantization={form}: not for a mixture; {name} are stacked experts")
        found[name] = shape
        if is_rounded(name, len(shape)):
            found[name + SCALE] = torch.Size((shape[0], 1))
    return found


def nonzero(scale: Tensor) -> Tensor:
    """Return a scale without zeros, for division."""
    return torch.where(scale > 0, scale, 1.0)
