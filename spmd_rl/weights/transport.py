"""`Transport`: how whole weights get from the ranks that train to engines. What it does is proven, not believed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from spmd_rl.train.base import Metrics
from spmd_rl.weights.probe import Answer
from spmd_rl.weights.stream import WeightStream


class Transport(Protocol):
    """Of a rank that trains. A publish calls `send`, `difference`, `announce` and perhaps `probe`, in order."""

    def awake(self) -> AbstractContextManager[object]:
        """Have the engine of this process awake inside, if there is one."""
        ...

    def send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """[all] while the result is iterated: take each tensor as it passes, and pass it on.

        weights: whole tensors under their Hugging Face names, on any device, each valid until the next one is asked
        for. RunFailed if an engine of this process refuses them.
        """
        ...

    def difference(self, stream: WeightStream) -> str:
        """Return the first difference between what was sent and what an engine of this process holds; or nothing."""
        ...

    def announce(self, version: int, probed: bool, num_bytes: int) -> Metrics:
        """[all] Let engines elsewhere fetch what was sent, which the ranks agree on; what there is to say of that.

        probed: those engines shall answer the probe. num_bytes: of all weights.
        """
        ...

    def probe(self, version: int) -> tuple[dict[str, list[Answer]], str]:
        """[all] Return what engines answer to the probe, by the names of their ranks, and what is wrong with it.

        Each engine's answers come to one rank.
        """
        ...
