"""`GivenAdapters`: the adapters that an engine computes with beside frozen weights, as it was given them.

Adapters come as peft's files name them, with `B` multiplied by alpha / rank already, so that an engine's own factor is
1: what it holds can be compared with what it was given to the bit, and no factor can be another.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor

from spmd_rl.model.lora import PREFIX, A


class GivenAdapters(ABC):
    """Those of the last load, beside one engine. Its package's subclass says how they get in, and what is held."""

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}
        """by peft's names"""
        self._names: frozenset[str] | None = None
        self.brings_base = True
        """Whether the last load brought the frozen weights, as the first one must."""

    @abstractmethod
    def put(self) -> list[str]:
        """Replace the adapter by what came; what is wrong with it, if anything."""

    @abstractmethod
    def held(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that the engine computes with, by peft's names: those of each layer that has an adapter."""

    def close(self) -> None:  # noqa: B027  most have nothing
        """Free what it holds beside the engine's memory; idempotent."""

    def base(self, weights: Iterable[tuple[str, Tensor]], is_first: bool) -> Iterator[tuple[str, Tensor]]:
        """The weights that are no adapters, which are kept; `brings_base` says whether there are any, or must be."""
        others = self._others(weights)
        one = next(others, None)
        self.brings_base = one is not None or is_first
        return chain([one] if one else [], others)

    def _others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self.given = {}
        for name, tensor in weights:
            if name.startswith(PREFIX):
                self.given[name] = tensor.detach().to("cpu", copy=True).contiguous()  # an engine may write to its own
            else:
                yield name, tensor

    def fault(self) -> str:
        """What is wrong with what came, if anything; all has been read."""
        names = frozenset(self.given)
        if not names or names != (self._names or names):
            odd = min(names ^ (self._names or frozenset()), default="no adapter")
            return f"the adapters are not those of the first version: {odd}"
        self._names = names
        return ""

    @property
    def layers(self) -> list[str]:
        """The names of the layers that have an adapter."""
        return [name.removeprefix(PREFIX).removesuffix(A) for name in self.given if name.endswith(A)]

    @property
    def config(self) -> dict[str, object]:
        """What peft writes beside such adapters."""
        rank = self.given[PREFIX + self.layers[0] + A].shape[0]
        kinds = sorted({layer.rpartition(".")[2] for layer in self.layers})
        return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": kinds}
