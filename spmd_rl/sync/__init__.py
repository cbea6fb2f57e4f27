"""The only road from training weights to an engine: `build(policy, engine, world)` gives a `Publisher`."""

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.sync.publisher import Publisher
from spmd_rl.train.base import TrainBackend

__all__ = ["Publisher", "build"]


def build(policy: TrainBackend, engine: Engine, world: World) -> Publisher:
    """The publisher of one policy into this rank's engine."""
    return Publisher(policy, engine, world)
