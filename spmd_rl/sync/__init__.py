"""The only road from training weights to an engine: trainer -> `Transport` -> `WeightStream` -> `Engine.load`.

    publish = sync.build(policy, engine, world, cfg.publish.probe_every)
    track.add(publish(version=step))  # [all]

Left out: the road to ranks that only generate (`split/`).
"""

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.sync.publisher import Publisher, difference
from spmd_rl.sync.stream import WeightStream
from spmd_rl.sync.transport import InProcess, Transport
from spmd_rl.train.base import TrainBackend

__all__ = ["InProcess", "Publisher", "Transport", "WeightStream", "build", "difference"]


def build(policy: TrainBackend, engine: Engine, world: World, probe_every: int = 1) -> Publisher:
    """Return the publisher of a policy into the engine in the same process; see `Publisher` for the arguments."""
    return Publisher(policy, engine, world, InProcess(), probe_every)
