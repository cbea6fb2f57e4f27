"""Settings for generation, so that modules below the pipelines need not read all of them."""

from dataclasses import dataclass

from spmd_rl.config.sections.data import DataConfig, RewardsConfig
from spmd_rl.config.sections.rollout import RolloutConfig


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Extract of a pipeline's settings for generation: `cfg.generation`."""

    rollout: RolloutConfig
    reward: RewardsConfig
    seed: int
    kv_tokens: int
    """Size of the KV cache: `engine.kv_tokens`."""
    uses_greedy: bool = False
    """True if a group has one more answer, drawn greedily; see `AlgorithmConfig.uses_greedy`."""
    evaluates: bool = False
    """True if held-out prompts are evaluated, by `eval.every`."""
    patience: float = 0.0
    """Value of `placement.patience`, in seconds."""
    data: DataConfig | None = None
    """Settings of prompts; None if prompts are tasks of environments, whose messages are known when they begin."""
    last_ahead: int = 0
    """Last step that is generated before the update of the step before it; 0: none."""
