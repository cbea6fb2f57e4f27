"""`CheckedWeights`: a check of all weights passed to an engine against those it expects."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


class CheckedWeights:
    """Iterator over the valid weights: each expected name once, in its shape. Iterate once, then call `end`."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size]) -> None:
        self._weights, self._shapes = iter(weights), shapes
        self._missing = dict(shapes)
        self._faults: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            shape = self._missing.pop(name, None)
            if shape is None:
                self._faults.append(
                    f"{name} came twice" if name in self._shapes else f"{name} is unknown to the engine"
                )
            elif shape != tensor.shape:
                self._faults.append(f"{name} has shape {tuple(tensor.shape)}, the engine's {tuple(shape)}")
            else:
                yield name, tensor

    def end(self) -> list[str]:
        """Read the rest, because other ranks may be gathering it with us; return all errors."""
        for _ in self:
            pass
        return self._faults + [f"{name} is missing" for name in self._missing]
