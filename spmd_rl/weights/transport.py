"""`Transport`: how whole weights get from the ranks that train to engines. `Publisher` verifies the result."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from spmd_rl.engine.base import Engine
from spmd_rl.train.base import Metrics
from spmd_rl.weights.probe import Answer


class Transport(Protocol):
    """One way for weights, on a rank that trains. A publish calls `send`, `announce` and perhaps `probe`, in order."""

    engine: Engine | None = None
    """The engine of this process, where it sends to that; awake from before `send` until after `probe`."""

    def send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """[all] while the result is iterated: take each tensor as it passes, and pass it on.

        weights: whole tensors under their Hugging Face names, on any device, each valid until the next one is asked
        for. RunFailed if an engine of this process refuses them.
        """
        ...

    def announce(self, version: int, probed: bool, num_bytes: int) -> Metrics:
        """[all] Make the sent version fetchable, after all ranks have staged theirs; return metrics.

        probed: those engines shall answer the probe. num_bytes: of all weights.
        """
        return {}

    def probe(self, version: int) -> tuple[dict[str, list[Answer]], str]:
        """[all] Return what engines answer to the probe, by the names of their ranks, and what is wrong with it.

        Each engine's answers come to one rank.
        """
        ...
