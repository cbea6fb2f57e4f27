"""`GivenAdapters`: published adapters of an engine with frozen weights.

Names are peft's; `B` includes alpha / rank, so the engine's factor is 1 and its tensors equal the published bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor

from spmd_rl.model.lora import PREFIX, A


class GivenAdapters(ABC):
    """Adapters from the last `load`. A subclass puts them into the engine and reads them back."""

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}
        """Published tensors by peft's names"""
        self._names: frozenset[str] | None = None
        self.brings_base = True
        """True if the last load had frozen weights, as the first must"""

    @abstractmethod
    def put(self) -> list[str]:
        """Replace the adapter by the published one; return faults."""

    @abstractmethod
    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the engine's tensors of each adapted layer, by peft's names."""

    def close(self) -> None:  # noqa: B027  most have nothing
        """Free memory outside the engine's; idempotent."""

    def base(self, weights: Iterable[tuple[str, Tensor]], is_first: bool) -> Iterator[tuple[str, Tensor]]:
        """Return the weights that are no adapters, storing the adapters on iteration; sets `brings_base`."""
        others = self._others(weights)
        one = next(others, None)
        self.brings_base = one is not None or is_first
        return chain([one] if one else [], others)

    def _others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self.given = {}
        for name, tensor in weights:
            if name.startswith(PREFIX):
                # A copy, because an engine may write to the tensor that it gets.
                self.given[name] = tensor.detach().to("cpu", copy=True).contiguous()
            else:
                yield name, tensor

    def fault(self) -> str:
        """Return a fault of the published adapters, after all were read."""
        names = frozenset(self.given)
        if not names or names != (self._names or names):
            odd = min(names ^ (self._names or frozenset()), default="no adapter")
            return f"the adapters are not those of the first version: {odd}"
        self._names = names
        return ""

    @property
    def layers(self) -> list[str]:
        """Names of layers with an adapter."""
        return [name.removeprefix(PREFIX).removesuffix(A) for name in self.given if name.endswith(A)]

    @property
    def config(self) -> dict[str, object]:
        """Contents of peft's `adapter_config.json`, for these adapters."""
        rank = self.given[PREFIX + self.layers[0] + A].shape[0]
        kinds = sorted({layer.rpartition(".")[2] for layer in self.layers})
        return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": kinds}
