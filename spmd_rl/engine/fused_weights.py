"""Weights that an engine expects, and its tensors under Hugging Face names.

Engines fuse projections of the same input, and may pack matrices. Plain tensors are compared bit by bit with published
ones; the probe checks the rest (`weights/probe.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from spmd_rl.base.hub import model_folder
from spmd_rl.model.build import auto_class, weights_of


def expected_shapes(path: Path | str, trust: bool = False) -> dict[str, torch.Size]:
    """Return each weight's shape by Hugging Face name, from `path/config.json`; tied ones under the first."""
    folder = model_folder(path)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    with torch.device("meta"), no_init_weights():
        module = auto_class(folder).from_config(config, trust_remote_code=trust)
    module.tie_weights()
    return {name: weight.shape for name, weight in weights_of(module).items()}


def plain_weights(
    model: nn.Module, shapes: Mapping[str, torch.Size], dtype: torch.dtype, fusions: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the engine's tensor by Hugging Face name if plain and whole, else None; tp=1 only.

    fusions: engine name of a fused projection -> its parts, in order of rows.
    """
    fused = {part: (one, parts) for one, parts in fusions.items() for part in parts}
    named = model.named_parameters(remove_duplicate=False)
    # Wrapped layers of adapters have this part in their names.
    parameters = {name.replace(".base_layer.", "."): tensor for name, tensor in named}
    for name, shape in shapes.items():
        *stem, module, kind = name.split(".")
        one, parts = fused.get(module, (module, [module]))
        begin = sum(shapes[".".join([*stem, part, kind])][0] for part in parts[: parts.index(module)])
        tensor = parameters.get(".".join([*stem, one, kind]))
        whole = tensor is not None and tensor.dtype == dtype and tensor.shape[1:] == shape[1:]
        rows = tensor[begin : begin + shape[0]] if whole else None
        yield name, rows if rows is not None and rows.shape == shape else None


class CheckedWeights:
    """Iterator over valid weights: each expected name once, in its shape. Iterate once, then call `end`."""

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
        """Read the rest, since other ranks may gather it too; return all errors."""
        for _ in self:
            pass
        return self._faults + [f"{name} is missing" for name in self._missing]
