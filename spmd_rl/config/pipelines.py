"""Pipelines of the package and their settings."""

from spmd_rl.config.diffusion import RewardFlConfig
from spmd_rl.config.schema import AgenticConfig, EvaluateConfig, RlvrConfig
from spmd_rl.config.supervised import DpoConfig, RewardModelConfig, SftConfig

_SCHEMAS = (RlvrConfig, AgenticConfig, SftConfig, DpoConfig, RewardModelConfig, RewardFlConfig, EvaluateConfig)
PIPELINES: dict[str, type] = {schema.pipeline: schema for schema in _SCHEMAS}
"""Schemas by name: `python -m spmd_rl.<name>`, `configs/<name>.yaml`"""
