"""`CheckedWeights`: all weights on their way into an engine, each of which must be one that it has."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


class CheckedWeights:
    """Those of them that are right: each name that is expected, once, in its shape. Iterate once, then `end`."""

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
        """Read what the engine left, for the sake of the ranks that gather with us; all that was wrong."""
        for _ in self:
            pass
        return self._faults + [f"{name} is missing" for name in self._missing]
