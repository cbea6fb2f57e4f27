"""Settings for generation, as modules below the pipelines need them."""

from dataclasses import dataclass

from spmd_rl.config.sections.data import DataConfig, RewardsConfig
from spmd_rl.config.sections.rollout import RolloutConfig


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Extract of a pipeline's settings for generation."""

    rollout: RolloutConfig
    reward: RewardsConfig
    seed: int
    kv_tokens: int
    uses_greedy: bool = False
    """True if a group has one more, greedy answer"""
    evaluates: bool = False
    patience: float = 0.0
    """Value of `placement.patience`, in seconds"""
    data: DataConfig | None = None
    """Settings of prompts; None for environments, whose messages come later"""
    last_ahead: int = 0
    """Last step that is generated before the previous update; 0: none"""
