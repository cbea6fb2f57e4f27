"""`Local`: the transport into the engine of the same process, which reads what the trainer gathers, with no copy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.train.base import Metrics
from spmd_rl.weights import probe
from spmd_rl.weights.stream import WeightStream


class Local:
    """A `Transport`; the last, where there are several: it passes on what the engine leaves."""

    def __init__(self, engine: Engine, world: World) -> None:
        """world: of the ranks that publish."""
        self._engine, self._world = engine, world

    def awake(self) -> AbstractContextManager[object]:
        """See `Transport`."""
        return self._engine.awake()

    def send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """See `Transport`."""
        self._engine.load(weights, version)  # [all]
        yield from weights

    def difference(self, stream: WeightStream) -> str:
        """See `Transport`."""
        return stream.difference(self._engine)

    def announce(self, version: int, probed: bool, num_bytes: int) -> Metrics:
        """See `Transport`: the engine has it already."""
        return {}

    def probe(self, version: int) -> tuple[dict[str, list[probe.Answer]], str]:
        """See `Transport`."""
        answers, fault = probe.ask(self._engine, version)
        return {f"rank {self._world.rank}": answers}, fault
