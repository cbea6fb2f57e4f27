"""Dumps of rollouts (`rollout.dump`): files, and the check before a replay (`rollout.replay`)."""

import json
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.config.sections.algorithm import AlgorithmConfig
from spmd_rl.config.sections.env import EnvsConfig, WarmupConfig
from spmd_rl.config.sections.models import PolicyConfig
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.config.sections.rollout import RolloutConfig
from spmd_rl.config.vocabulary import digest

FOLDER, ABOUT = "rollouts", "about.json"


def about_samples(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, policy: PolicyConfig, env: EnvsConfig | None = None
) -> dict[str, Any]:
    """Return properties of all samples that training relies on."""
    return {
        # Samples hold token ids, which mean nothing in another vocabulary.
        "the vocabulary of policy.model": digest(model_folder(policy.model)),
        "rollout.answers_per_prompt": rollout.answers_per_prompt,
        "rollout.temperature": rollout.temperature,
        "rollout.constraint": rollout.constraint.given and list(rollout.constraint.given),
        **{f"rollout.{key}": value for key, value in rollout.truncation.items()},
        "policy.router_replay": policy.router_replay,
        "the greedy answer of algorithm.advantage": algorithm.uses_greedy,
        "env": env is not None,
    }


def step_file(folder: Path, step: int) -> Path:
    """Return a step's file in its folder."""
    return folder / f"step-{step:06d}.json"


def check_replay(
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    policy: PolicyConfig,
    placement: PlacementConfig,
    steps: int,
    env: EnvsConfig | None = None,
    warmup: WarmupConfig | None = None,
) -> None:
    """Check that `rollout.replay` has all steps, of samples that this run could generate."""
    if rollout.replay is None:
        return
    if placement.is_split:
        raise UserError(
            f"placement.mode: {placement.mode} is not supported with rollout.replay, which generates nothing"
        )
    if warmup and warmup.steps:
        raise UserError("warmup.steps: must be 0 with rollout.replay, which plays no environment")
    run, now = Path(rollout.replay).expanduser(), about_samples(rollout, algorithm, policy, env)
    try:
        then = json.loads((run / FOLDER / ABOUT).read_text())
    except (OSError, ValueError):
        raise UserError(
            f"rollout.replay: {run} is not a run with saved rollouts, which rollout.dump=true writes"
        ) from None
    if odd := next((key for key in now if then.get(key) != now[key]), None):
        raise UserError(f"rollout.replay: {odd} is {then.get(odd)} in {run} and {now[odd]} here")
    last = next(step for step in range(steps + 1) if not step_file(run / FOLDER, step + 1).is_file() or step == steps)
    if last < steps:
        raise UserError(f"rollout.replay: {run} ends with step {last}, and steps={steps}; set steps={last}")
