"""Checks of `rollout.constraint`: grammars can be compiled here, and no other setting breaks them."""

import importlib.util
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.config.packages import unsupported
from spmd_rl.config.sections.engine import EngineConfig
from spmd_rl.config.sections.env import WarmupConfig
from spmd_rl.config.sections.rollout import SamplingConfig
from spmd_rl.config.sections.teachers import TeachersConfig


def check_constraint(
    rollout: SamplingConfig,
    engine: EngineConfig,
    teacher: TeachersConfig | None = None,
    warmup: WarmupConfig | None = None,
) -> None:
    """Check that answers can be held to their grammar."""
    if rollout.constraint.given is None:
        return
    key = f"rollout.constraint.{rollout.constraint.given[0]}"
    if importlib.util.find_spec("xgrammar") is None:
        raise UserError(f"{key}: xgrammar is not installed here; pip install 'spmd-rl[constraint]'")
    if found := unsupported("xgrammar"):
        raise UserError(f"{key}: xgrammar {found[0]} is not {found[1]}; pip install 'spmd-rl[constraint]'")
    refused: dict[str, Any] = {
        "engine.drafts": engine.drafts,
        "engine.pp above 1": engine.pp > 1,
        "engine.args.async_scheduling": engine.args.get("async_scheduling"),
        "engine.args.speculative_config": "speculative_config" in engine.args,
        "rollout.stop, which would cut answers short": rollout.stop,
        "rollout.thinking_budget, whose text is no part of it": rollout.thinking_budget,
        "rollout.target, whose turns may go on within an answer": rollout.target,
        "teacher.model, whose answers are free": teacher and teacher.by_domain,
        "warmup.steps, whose demonstrations are free": warmup and warmup.steps,
    }
    for what, applies in refused.items():
        if applies:
            raise UserError(f"{key}: not with {what}")
