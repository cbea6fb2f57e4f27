"""Which ranks train and which generate: `placement`."""

from dataclasses import dataclass, field

from spmd_rl.config.values import at_least, one_of, require


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
    the last rank. Default: those that do not train."""
    reference: str | None = None
    """The ranks that do nothing but hold the reference, in the layout and by the backend of `reference.train`, and
    compute its logprobs, written like `train`; a share is counted from the last rank. The others train and generate.
    Default: those that train hold it too."""
    teacher: str | None = None
    """The same of the teachers; they may be the ranks of the reference."""
    max_staleness: int = 1
    """With `split` and `lent`: by how many updates the policy that generates a step's answers may be behind the one
    that is trained on them. 0: strictly on-policy, and one side waits while the other works. With `overlapped` it is 1.
    """
    patience: float = field(default=0.5, metadata={"agents": True})
    """With `overlapped`, for agents: a rank whose engine has nothing to compute turns to the update once no environment
    has replied for so many seconds. The turns that follow are those of the newer policy."""

    def __post_init__(self) -> None:
        one_of(self, mode=("colocated", "split", "lent", "overlapped"))
        at_least(self, max_staleness=0, patience=0)
        given = [key for key in ("train", "generate") if getattr(self, key) is not None]
        require(self.is_split or not given, f"{', '.join(given)}: only with placement.mode=split or lent")
        ahead = not self.is_overlapped or self.max_staleness == 1
        require(ahead, f"max_staleness: {self.max_staleness} is not what overlapped does: it is one step ahead, 1")

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
    def is_overlapped(self) -> bool:
        """Whether the next step is generated before the update."""
        return self.mode == "overlapped"
