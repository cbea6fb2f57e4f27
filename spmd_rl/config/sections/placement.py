"""Section `placement`, the division of ranks between training and generation."""

from dataclasses import dataclass, field

from spmd_rl.config.values import at_least, one_of, require


@dataclass
class PlacementConfig:
    """Division of the ranks between training and generation: `placement`."""

    mode: str = "colocated"
    """`colocated`: every rank trains and generates, in turns. `split`: some train while others generate. `lent`: as
    `split`, but trainer ranks also generate until the step's answers are complete. `overlapped`: in turns, but the next
    step is generated before the update, during which its verdicts arrive."""
    train: str | None = None
    """Trainer ranks with `split` and `lent`, as `0-3` or `0,2,4-7`, or their share from rank 0, as `25%`. Default:
    those that do not generate, or the first half."""
    generate: str | None = None
    """Ranks that only generate with `split` and `lent`, as for `train`, shares from the last rank. Default: those that
    do not train."""
    reference: str | None = None
    """Ranks that only compute the reference's logprobs, in the layout and backend of `reference.train`; written as for
    `generate`. Default: trainer ranks hold it too."""
    teacher: str | None = None
    """Ranks that only hold teachers, in the same form; they may be the reference's."""
    max_staleness: int = 1
    """Updates by which the generating policy may lag behind (`split`, `lent`). 0: strictly on-policy, so that one side
    waits for the other. Always 1 with `overlapped`."""
    patience: float = field(default=0.5, metadata={"agents": True})
    """Seconds without any environment's reply after which a rank with an idle engine begins the update (`overlapped`,
    agents). Later turns use the newer policy."""

    def __post_init__(self) -> None:
        one_of(self, mode=("colocated", "split", "lent", "overlapped"))
        at_least(self, max_staleness=0, patience=0)
        given = [key for key in ("train", "generate") if getattr(self, key) is not None]
        require(self.is_split or not given, f"{', '.join(given)}: only with placement.mode=split or lent")
        ahead = not self.is_overlapped or self.max_staleness == 1
        require(ahead, f"max_staleness: must be 1 with overlapped, one step ahead, not {self.max_staleness}")

    @property
    def frozen(self) -> dict[str, str]:
        """Dedicated ranks of frozen roles, by role."""
        return {key: ranks for key in ("reference", "teacher") if (ranks := getattr(self, key)) is not None}

    @property
    def is_split(self) -> bool:
        """True if some ranks train while others generate."""
        return self.mode in ("split", "lent")

    @property
    def is_lent(self) -> bool:
        """True if trainer ranks also generate at times."""
        return self.mode == "lent"

    @property
    def is_overlapped(self) -> bool:
        """True if the next step is generated before the update."""
        return self.mode == "overlapped"
