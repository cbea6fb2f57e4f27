"""Settings: dataclasses with defaults and checks, composed by Hydra and checked before the process group forms.

A pipeline imports its settings and `main`; a user's own pipeline imports `PipelineConfig` and adds its sections. Other
modules import the dataclass that they need from `schema`.
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
