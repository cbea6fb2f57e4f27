"""Settings: dataclasses with defaults and checks, composed by Hydra and checked before the process group forms.

A user's own pipeline imports `PipelineConfig`, adds its sections, and calls `main`.
"""

from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.main import main
from spmd_rl.config.schema import AgenticConfig, EvaluateConfig, PipelineConfig, RlvrConfig
from spmd_rl.config.supervised import DpoConfig, RewardModelConfig, SftConfig

__all__ = [
    "AgenticConfig",
    "DpoConfig",
    "EvaluateConfig",
    "PipelineConfig",
    "RewardFlConfig",
    "RewardModelConfig",
    "RlvrConfig",
    "SftConfig",
    "main",
]
