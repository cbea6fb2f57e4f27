"""Settings of pipelines that train on written answers."""

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
    """Settings of supervised pipelines, on rows with written answers."""

    row_kind: ClassVar[str] = "demonstration"
    """Kind of the rows, a key of `data.conversations.KINDS`"""

    epochs: float | None = None
    """Passes over `data.train`, which override `steps`. Default: as many as `steps` takes."""
    data: RowsConfig = field(default_factory=RowsConfig)
    eval: ValidationConfig = field(default_factory=ValidationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        above(self, epochs=0)

    def count_rows(self, num_rows: int) -> int | None:
        """Set `steps` by `epochs` of `num_rows` rows; return the run's rows, None without `epochs`."""
        if self.epochs is None:
            return None
        # A part of an epoch ends within a step, so rows are counted, not steps.
        total = max(1, round(self.epochs * num_rows))
        self.steps = -(-total // self.data.rows_per_step)
        return total


@dataclass
class SftConfig(RowsPipelineConfig):
    """Settings of `python -m spmd_rl.sft`."""

    pipeline = "sft"
    teacher: TeachersConfig = field(default_factory=TeachersConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not self.teacher.hints, "teacher.hint: is for answers that the policy samples (spmd_rl.rlvr)")

    @property
    def roles(self) -> list[RoleConfig]:
        """Settings of the policy and its teachers."""
        return [*super().roles, *(self.role(*teacher) for teacher in self.teacher.sections.items())]


@dataclass
class DpoConfig(RowsPipelineConfig):
    """Settings of `python -m spmd_rl.dpo`."""

    pipeline = "dpo"
    data: PairsConfig = field(default_factory=PairsConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    @property
    def kind(self) -> str:
        """Part of a run's name: the loss."""
        return self.preference.loss

    @property
    def row_kind(self) -> str:
        """Kind of rows: judged answers, or preferences."""
        return "judged" if self.preference.is_judged else "preference"

    @property
    def roles(self) -> list[RoleConfig]:
        """Settings of the policy, and a needed reference."""
        return [self.role("policy"), *([self.role("reference")] if self.preference.uses_reference else [])]


@dataclass
class RewardModelConfig(RowsPipelineConfig):
    """Settings of `python -m spmd_rl.reward_model`; `policy` is its initial model."""

    pipeline = "reward_model"
    data: LabelledConfig = field(default_factory=LabelledConfig)
    head: str = "pairwise"
    """Source of rewards: `pairwise`, the better of two answers; `outcome`, a right answer; `process`, each right
    step."""
    center_coef: float = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps them around 0 (`pairwise`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, head=("pairwise", "outcome", "process"))
        at_least(self, center_coef=0)
        require(
            not self.center_coef or self.head == "pairwise", f"center_coef: head={self.head} has no pairs; must be 0"
        )

    @property
    def row_kind(self) -> str:
        """Kind of the rows, by the head."""
        return "ranked" if self.head == "pairwise" else self.head

    @property
    def separator(self) -> str | None:
        """Text between an answer's steps, if each has a reward."""
        return self.data.separator if self.head == "process" else None

    @property
    def roles(self) -> list[RoleConfig]:
        """Settings of a critic, built from the policy's."""
        return [replace(self.role("policy"), name="critic", section="policy", value_bias=False)]
