"""Which ranks train and which generate: `placement`."""

import re
from dataclasses import dataclass

from spmd_rl.config.values import at_least, one_of, require


@dataclass
class PlacementConfig:
    """Which ranks train and which generate: `placement`."""

    mode: str = "colocated"
    """`colocated`: every rank trains and generates, in turns. `split`: some ranks train while others generate."""
    train: str | None = None
    """With `split`: the ranks that train, as `0-3` or `0,2,4-7`, or their share, as `25%`, counted from rank 0.
    Default: those that do not generate, or the first half."""
    generate: str | None = None
    """With `split`: the ranks that generate, written like `train`; a share is counted from the last rank. Default:
    those that do not train."""
    max_staleness: int = 1
    """With `split`: by how many updates the policy that generates a step's answers may be behind the one that is
    trained on them. 0: strictly on-policy, and one side waits while the other works."""

    bind: str = "ipc"
    """With `split`: where training ranks listen for generating ones. `ipc`: sockets in a private directory of one
    machine. `tcp://ADDRESS` (`*` for all addresses of each node): any free port; beyond one machine only with
    `sidecar.keys`."""

    def __post_init__(self) -> None:
        require(
            self.bind == "ipc" or re.fullmatch(r"tcp://(\*|\[[^]]+]|[0-9.]+)", self.bind),
            f"bind: must be ipc or tcp://ADDRESS, ADDRESS in digits or *, not {self.bind!r}",
        )
        one_of(self, mode=("colocated", "split"))
        at_least(self, max_staleness=0)
        given = [key for key in ("train", "generate") if getattr(self, key) is not None]
        require(self.is_split or not given, f"{', '.join(given)}: only with placement.mode=split")

    @property
    def is_split(self) -> bool:
        """Whether some ranks train while others generate."""
        return self.mode == "split"
