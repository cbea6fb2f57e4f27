"""LoRA adapters as tensors: peft's names, and their merge into a frozen weight.

An adapter of a layer `X` is `A` [rank, inputs] and `B` [outputs, rank]: the layer computes with W + s B A. DoRA scales
each row of that sum to a norm, its magnitude [outputs].
"""

from typing import NamedTuple

from torch import Tensor

PREFIX = "base_model.model."
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
"""Names of a layer's tensors in peft's files, after `PREFIX` and layer name"""
SCALING = "adapter/scaling"
"""Name of the factor s in a saved state, float64 []"""
IN_NF4 = "adapter/base_in_nf4"
"""Name in a saved state of adapters over 4-bit weights, float64 []"""


class Adapter(NamedTuple):
    """Adapter of one layer, whole."""

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None

    def added_to(self, weight: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return the merged weight, or `rows` of it: float32. weight: the frozen one."""
        wide = weight.dtype
        found = weight + self.scaling * (self.b[rows].to(wide) @ self.a.to(wide))
        if self.magnitude is not None:
            found *= (self.magnitude[rows].to(wide) / found.norm(dim=1))[:, None]
        return found
