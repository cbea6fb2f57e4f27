"""Adapters (LoRA) as tensors: under which names peft stores them, and the weight that they make of a frozen one.

An adapter of a linear layer `X` is `A` [rank, inputs] and `B` [outputs, rank]: the layer computes with W + s B A. With
DoRA also a magnitude [outputs]: each row of that sum is brought to the length that it says.
"""

from typing import NamedTuple

from torch import Tensor

PREFIX = "base_model.model."
A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
"""What peft's files call the tensors of a layer, after `PREFIX` and the layer's name"""
SCALING = "adapter/scaling"
"""In a saved state: the factor s, float64 []"""
IN_NF4 = "adapter/base_in_nf4"
"""In that of adapters over weights in 4 bits, float64 []"""


class Adapter(NamedTuple):
    """One layer's, whole."""

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None

    def added_to(self, weight: Tensor, rows: slice = slice(None)) -> Tensor:
        """What the layer computes with, or some `rows` of it: float32, as `weight`, which is the frozen one's."""
        wide = weight.dtype
        found = weight + self.scaling * (self.b[rows].to(wide) @ self.a.to(wide))
        if self.magnitude is not None:
            found *= (self.magnitude[rows].to(wide) / found.norm(dim=1))[:, None]
        return found
