"""`Local`: the transport into the engine of the same process, which reads what the trainer gathers, with no copy."""

from collections.abc import Iterator

from torch import Tensor

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.weights import probe
from spmd_rl.weights.transport import Transport


class Local(Transport):
    """Goes last where there are several: its engine reads all weights, and may leave none to the next (`Publisher`)."""

    def __init__(self, engine: Engine, world: World) -> None:
        """world: of the ranks that publish."""
        self.engine, self._rank = engine, world.rank

    def send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """See `Transport`."""
        self.engine.load(weights, version)  # [all]
        yield from weights

    def probe(self, version: int) -> tuple[dict[str, list[probe.Answer]], str]:
        """See `Transport`."""
        answers, fault = probe.ask(self.engine, version)
        return {f"rank {self._rank}": answers}, fault
