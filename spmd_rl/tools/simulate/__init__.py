"""The scheduler on virtual clocks: rounds, coordinators and claims are the real ones, engines and the store are models.

`lengths` says how long answers get, `engine` how long they take, `store` counts what it is asked, `replica` and
`cluster` play the steps of a `scene`, `policies` compares. `python -m spmd_rl simulate` is the front.
"""

from spmd_rl.tools.simulate.cluster import Cluster, VirtualStep
from spmd_rl.tools.simulate.engine import Speed
from spmd_rl.tools.simulate.lengths import Lengths, long_tail, recorded
from spmd_rl.tools.simulate.policies import POLICIES, PolicyResult, play
from spmd_rl.tools.simulate.scene import Scene

__all__ = [
    "POLICIES",
    "Cluster",
    "Lengths",
    "PolicyResult",
    "Scene",
    "Speed",
    "VirtualStep",
    "long_tail",
    "play",
    "recorded",
]
