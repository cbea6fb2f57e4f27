"""Which ranks train and which generate: `placement`."""

import re
from dataclasses import dataclass, field

from spmd_rl.config.values import at_least, one_of, require
from spmd_rl.curve_keys import check_connect, is_address


@dataclass
class PlacementConfig:
    """Which ranks train and which generate: `placement`."""

    mode: str = "colocated"
    """`colocated`: every rank trains and generates, in turns. `split`: some ranks train while others generate. `lent`:
    the ranks that train also generate, until the step's answers are there, and then go back to train.
    `overlapped`: in turns too, and the next step is generated before the update, during which its verdicts come in."""
    train: str | None = None
    """With `split` and `lent`: the ranks that train, as `0-3` or `0,2,4-7`, or their share, as `25%`, counted from
    rank 0. Default: those that do not generate, or the first half."""
    generate: str | None = None
    """With `split` and `lent`: the ranks that do nothing but generate, written like `train`; a share is counted from
    the last rank. Default: those that do not train. With `split`, `attached`: all ranks of this job train, and
    jobs of their own generate, which attach to it with the same command line and `placement.attach`."""
    reference: str | None = None
    """With `colocated` and `overlapped`: the ranks that do nothing but hold the reference, in the layout and by the
    backend of `reference.train`, and compute its logprobs, written like `train`; a share is counted from the last
    rank. All other ranks train and generate. Default: those that train hold it too."""
    teacher: str | None = None
    """The same of the teachers; they may be the ranks of the reference."""
    attach: str | None = None
    """With `generate=attached`: be a job that generates, for the training job that has its run directory here, or
    listens at this `tcp://HOST:PORT`. `auto`: for the one that has the `run.dir` of this very line."""
    min_generate: int = 1
    """With `generate=attached`: training begins when so many generating ranks have attached."""
    lease_seconds: float = 30.0
    """With `generate=attached`: what an attached rank had begun is done by others once it has been silent for so long.
    """
    absent_seconds: float = 3600.0
    """With `generate=attached`: for how long training waits for attached ranks of which none moves, and an attached job
    for a training job, before it is a stall."""
    max_staleness: int = 1
    """With `split` and `lent`: by how many updates the policy that generates a step's answers may be behind the one
    that is trained on them. 0: strictly on-policy, and one side waits while the other works. With `overlapped` it is 1.
    """
    swap: str | None = None
    """With `split` and `lent`: when a rank that only generates takes over a newer policy. `step`: between two steps.
    `recompute`: also in the middle of answers, as soon as it has been fetched; they go on from the tokens that they
    have, whose keys and values are computed again. `keep`: the same, with the keys and values that the older policy
    computed, which costs nothing and is not exact (`engine.name=native` alone).
    Default: `step`, and `recompute` with `lent`."""
    patience: float = field(default=0.5, metadata={"agents": True})
    """With `overlapped`, for agents: a rank whose engine has nothing to compute turns to the update once no environment
    has replied for so many seconds. The turns that follow are those of the newer policy."""
    bind: str = "ipc"
    """With `split` and `lent`: where training ranks listen for generating ones. `ipc`: sockets in a private directory
    of one machine. `tcp://ADDRESS` (`*` for all addresses of each node): any free port; only with `sidecar.keys`, on
    loopback too, which every user of a machine reaches."""

    def __post_init__(self) -> None:
        host = re.fullmatch(r"tcp://(\*|\[[^]]+]|[0-9.]+)", self.bind)
        require(
            self.bind == "ipc" or (host and (host[1] == "*" or is_address(host[1]))),
            f"bind: must be ipc or tcp://ADDRESS, ADDRESS in digits or *, not {self.bind!r}",
        )
        one_of(self, mode=("colocated", "split", "lent", "overlapped"), swap=("step", "recompute", "keep"))
        at_least(self, max_staleness=0, patience=0, min_generate=1, lease_seconds=0.5, absent_seconds=0)
        if "://" in (self.attach or ""):
            check_connect("attach", self.attach)
        beside = self.mode in ("colocated", "overlapped") or not self.frozen
        require(beside, f"{', '.join(self.frozen)}: only with placement.mode=colocated or overlapped, not {self.mode}")
        given = [key for key in ("train", "generate") if getattr(self, key) is not None]
        require(self.is_split or not given, f"{', '.join(given)}: only with placement.mode=split or lent")
        at_once = self.swap != "step" or not self.is_lent
        require(at_once, "swap: must be recompute or keep with placement.mode=lent, where steps wait for lent ranks")
        ahead = not self.is_overlapped or self.max_staleness == 1
        require(ahead, f"max_staleness: {self.max_staleness} is not what overlapped does: it is one step ahead, 1")
        require(self.is_attached or self.attach is None, "attach: only with placement.generate=attached")
        require(not self.is_attached or self.train is None, "train: all ranks train with placement.generate=attached")

    @property
    def frozen(self) -> dict[str, str]:
        """What names ranks of their own for frozen roles, by role."""
        return {key: ranks for key in ("reference", "teacher") if (ranks := getattr(self, key)) is not None}

    @property
    def is_split(self) -> bool:
        """Whether some ranks train while others generate."""
        return self.mode in ("split", "lent")

    @property
    def is_lent(self) -> bool:
        """Whether the ranks that train also generate, until the step's answers are there."""
        return self.mode == "lent"

    @property
    def is_attached(self) -> bool:
        """Whether jobs of their own generate, and attach to the one that trains."""
        return self.mode == "split" and self.generate == "attached"

    @property
    def part(self) -> str:
        """Which of `spmd_rl.placement` a job is: its mode, or the side of `generate=attached` that it is."""
        if self.is_attached:
            return "attached_trainer" if self.attach is None else "attached_generator"
        return self.mode

    @property
    def is_overlapped(self) -> bool:
        """Whether the next step is generated before the update."""
        return self.mode == "overlapped"
