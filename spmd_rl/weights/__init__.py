"""Weight sync (trainer -> engine), all of it: trainer -> `WeightStream` -> `Transport` -> `Engine.load`.

    publish = weights.build(policy, engine, world, cfg.publish.probe_every)  # into the engine of the same process
    publish = Publisher(policy, world, [Served(...)], cfg.publish.probe_every)  # into engines that fetch
    track.add(publish(version=step))  # [all]

One `Publisher` paces, verifies and measures; transports stand side by side, and a policy may go by several at once.

    local:   `Local`, the engine reads what the trainer gathers
    served:  `Served` keeps a version in host memory (`StagedWeights`); a generating rank fetches it (`WeightClient`),
             whole or as deltas, and loads it (`WeightReceiver`), in the middle of a step where it may (`InFlight`)

Left out: a collective from trainers to the first ranks of replicas, which would be a third transport.
"""

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.train.base import PolicyRole
from spmd_rl.weights.local import Local
from spmd_rl.weights.publisher import Publisher
from spmd_rl.weights.served import Served
from spmd_rl.weights.transport import Transport

__all__ = ["Local", "Publisher", "Served", "Transport", "build"]


def build(
    policy: PolicyRole, engine: Engine, world: World, probe_every: int = 1, quantization: str | None = None
) -> Publisher:
    """Return the publisher of a policy into the engine in the same process; see `Publisher` for the arguments."""
    return Publisher(policy, world, [Local(engine, world)], probe_every, quantization)
