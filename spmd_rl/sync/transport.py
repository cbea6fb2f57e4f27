"""`Transport`: how whole weights get from the ranks that train to the ranks that generate."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class Transport(Protocol):
    """Carries one pass over the weights at a time. What it does to them is proven by the publisher, not believed."""

    def carry(self, weights: Iterator[tuple[str, Tensor]] | None) -> Iterator[tuple[str, Tensor]]:
        """[all] Carry all weights, in the trainer's order; the lines that meet are those that iterate the result.

        weights: `TrainBackend.weights()` on a rank that trains, None elsewhere. Every rank iterates the result to its
        end, whether it has an engine or not. A rank that trains gets the tensors it gave, any other those that arrived:
        each whole, under its Hugging Face name, on any device, and valid until the next one is asked for.
        """
        ...


class InProcess:
    """The transport of ranks that all train and generate: the engine reads what the trainer gathers, with no copy."""

    def carry(self, weights: Iterator[tuple[str, Tensor]] | None) -> Iterator[tuple[str, Tensor]]:
        """See `Transport`."""
        assert weights is not None, "a rank that does not train needs a transport from those that do"
        return weights
