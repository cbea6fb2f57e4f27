"""Weight sync: trainer -> `WeightStream` -> engine of the same process, or -> `Buckets` -> engines of other ranks.

    publish = weights.build(policy, engine, world, cfg.publish.probe_every)  # into the engine of the same process
    publish = Publisher(policy, trainers, None, buckets=buckets, everyone=world)  # into engines of other ranks
    track.add(publish(version=step))  # [all]

`Publisher` sends, verifies and measures; `WeightReceiver` is the other end of `Buckets`.
"""

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.train.base import PolicyRole
from spmd_rl.weights.collective import Buckets
from spmd_rl.weights.publisher import Publisher
from spmd_rl.weights.receiver import WeightReceiver

__all__ = ["Buckets", "Publisher", "WeightReceiver", "build"]


def build(
    policy: PolicyRole, engine: Engine, world: World, probe_every: int = 1, quantization: str | None = None
) -> Publisher:
    """Return the publisher of a policy into this process's engine."""
    return Publisher(policy, world, engine, probe_every, quantization)
