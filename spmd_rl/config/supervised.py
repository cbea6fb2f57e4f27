"""The settings of the pipelines that train on rows that are written; see `schema`."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from spmd_rl.config.schema import PipelineConfig
from spmd_rl.config.sections.models import ReferenceConfig, RoleConfig
from spmd_rl.config.sections.preference import LabelledConfig, PairsConfig, PreferenceConfig
from spmd_rl.config.sections.rows import RowsConfig, ValidationConfig
from spmd_rl.config.sections.teachers import TeachersConfig
from spmd_rl.config.values import above, at_least, one_of, require


@dataclass
class RowsPipelineConfig(PipelineConfig):
    """The settings that pipelines of supervised learning have in common: they train on rows that are written."""

    row_kind: ClassVar[str] = "demonstration"
    """What rows are: see `data.conversations.KINDS`."""

    epochs: float | None = None
    """Passes over `data.train`, from which `steps` follows, whatever it is. Default: as many as `steps` takes."""
    data: RowsConfig = field(default_factory=RowsConfig)
    eval: ValidationConfig = field(default_factory=ValidationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        above(self, epochs=0)

    def count_rows(self, num_rows: int) -> int | None:
        """Set `steps` to what `epochs` of so many rows take. Return at which row of the run it ends; None: at none."""
        if self.epochs is None:
            return None
        total = max(1, round(self.epochs * num_rows))
        self.steps = -(-total // self.data.rows_per_step)
        return total


@dataclass
class SftConfig(RowsPipelineConfig):
    """The settings of `python -m spmd_rl.sft`."""

    pipeline = "sft"
    teacher: TeachersConfig = field(default_factory=TeachersConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.teacher.hints, "teacher.hint: is for answers that the policy samples (spmd_rl.rlvr)")

    @property
    def roles(self) -> list[RoleConfig]:
        """The policy, and its teachers."""
        return [*super().roles, *(self.role(*teacher) for teacher in self.teacher.sections.items())]


@dataclass
class DpoConfig(RowsPipelineConfig):
    """The settings of `python -m spmd_rl.dpo`."""

    pipeline = "dpo"
    data: PairsConfig = field(default_factory=PairsConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    @property
    def kind(self) -> str:
        """See `PipelineConfig.kind`."""
        return self.preference.loss

    @property
    def row_kind(self) -> str:
        """See `RowsPipelineConfig.row_kind`."""
        return "judged" if self.preference.is_judged else "preference"

    @property
    def roles(self) -> list[RoleConfig]:
        """The policy, and the reference unless the loss does without."""
        return [self.role("policy"), *([self.role("reference")] if self.preference.uses_reference else [])]


@dataclass
class RewardModelConfig(RowsPipelineConfig):
    """The settings of `python -m spmd_rl.reward_model`; `policy` is the model that it is made of."""

    pipeline = "reward_model"
    data: LabelledConfig = field(default_factory=LabelledConfig)
    head: str = "pairwise"
    """What rewards are learnt from: `pairwise`, which of two answers is better; `outcome`, whether an answer is right;
    `process`, whether each of its steps is."""
    center_coef: float = 0.0
    """Weight of the square of the sum of a pair's rewards, which keeps rewards around 0 (`pairwise`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, head=("pairwise", "outcome", "process"))
        at_least(self, center_coef=0)
        require(not self.center_coef or self.head == "pairwise", f"center_coef: head={self.head} has no pairs")

    @property
    def row_kind(self) -> str:
        """See `RowsPipelineConfig.row_kind`."""
        return "ranked" if self.head == "pairwise" else self.head

    @property
    def separator(self) -> str | None:
        """At which answers are cut into steps that have a reward each; None: they are not."""
        return self.data.separator if self.head == "process" else None

    @property
    def roles(self) -> list[RoleConfig]:
        """A critic, built from the policy's settings."""
        return [replace(self.role("policy"), name="critic", section="policy", value_bias=False)]
