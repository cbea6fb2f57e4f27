"""What generating takes from the settings of a pipeline, so that nobody below the pipelines reads all of them."""

from dataclasses import dataclass

from spmd_rl.config.sections.data import DataConfig, RewardsConfig
from spmd_rl.config.sections.rollout import RolloutConfig


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """`cfg.generation`."""

    rollout: RolloutConfig
    reward: RewardsConfig
    seed: int
    kv_tokens: int
    """See `engine.kv_tokens`."""
    uses_greedy: bool = False
    """Whether a group has one more answer, drawn greedily; see `AlgorithmConfig.uses_greedy`."""
    evaluates: bool = False
    """See `eval.every`."""
    patience: float = 0.0
    """See `placement.patience`."""
    data: DataConfig | None = None
    """None where prompts are tasks of environments, whose messages are known when they begin."""
    last_ahead: int = 0
    """The last step that is begun before the update of the step before it; 0: none is."""
