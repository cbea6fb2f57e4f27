"""Preferences: `preference`, and the rows of `spmd_rl.dpo`."""

from dataclasses import dataclass

from spmd_rl.config.sections.data import COMMON, NO_DATA
from spmd_rl.config.sections.rows import RowsConfig
from spmd_rl.config.values import above, at_least, one_of, require

LOSSES = {
    "dpo": ("label_smoothing", "length_normalised", "reference_free"),
    "ipo": ("reference_free",),
    "simpo": ("label_smoothing", "margin"),
    "hinge": ("length_normalised", "reference_free"),
    "kto": ("desirable_weight", "undesirable_weight"),
}
"""Keys of `preference` that each loss reads, besides `beta`"""


@dataclass
class PreferenceConfig:
    """Preference loss: `preference`. docs/ALGORITHMS.md has formulas."""

    loss: str = "dpo"
    """`dpo`, `ipo`, `simpo` and `hinge` compare pairs; `kto` takes answers with a `label`, and pairs as two of these.
    """
    beta: float = 0.1
    """Factor of rewards: mostly, how strongly the policy is held to the reference."""
    label_smoothing: float = 0.0
    """Share of labels assumed wrong, below 0.5."""
    length_normalised: bool = False
    """Use an answer's mean token reward, as `ipo` and `simpo` always do."""
    reference_free: bool = False
    """Omit the reference, as if all answers were equally likely under it; `simpo` always does."""
    margin: float = 0.5
    """Margin of the chosen over the rejected answer's reward (`simpo`: gamma)."""
    desirable_weight: float = 1.0
    """Weight of good answers (`kto`)."""
    undesirable_weight: float = 1.0
    """Weight of bad answers (`kto`)."""

    def __post_init__(self) -> None:
        one_of(self, loss=LOSSES)
        above(self, beta=0)
        at_least(self, label_smoothing=0, desirable_weight=0, undesirable_weight=0)
        require(self.label_smoothing < 0.5, f"label_smoothing: must be below 0.5, not {self.label_smoothing}")

    @property
    def is_judged(self) -> bool:
        """True if answers are labelled singly, not in pairs."""
        return self.loss == "kto"

    @property
    def uses_reference(self) -> bool:
        """True if the reference's logprobs are needed."""
        return self.loss != "simpo" and not (self.reference_free and "reference_free" in LOSSES[self.loss])


@dataclass
class PairsConfig(RowsConfig):
    """Rows of preferences: `data` (docs/SUPERVISED.md)."""

    known_keys = ("prompt", "chosen", "rejected", "completion", "label", "margin", "completions", "labels", *COMMON)
    no_data = NO_DATA.format(
        what="sums", demo="demo_dpo", rows="pairs", line="data.train=pairs.jsonl", page="SUPERVISED.md"
    )


@dataclass
class LabelledConfig(PairsConfig):
    """Rows of a reward model: `data` (docs/SUPERVISED.md)."""

    separator: str = "\\n\\n"
    """Text between the steps of an answer (`head=process`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A command line writes a line break as a backslash and an n.
        self.separator = self.separator.replace("\\n", "\n")
        require(bool(self.separator), "separator: must not be empty")
