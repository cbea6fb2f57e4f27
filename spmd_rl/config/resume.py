"""Changes of settings that are allowed when a command continues the run in its `run.dir`.

    for line in continue_run(cfg, "rlvr"):
        print(f"notice: {line}")

Settings that may change at any time are not compared. Other changes give a notice, or, if they make another experiment
of the run, an error with the way to begin that one.
"""

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.config.algorithm_targets import sources
from spmd_rl.config.keys import flatten, to_dict
from spmd_rl.config.run_identity import identity, saved_config

MAY_CHANGE = (
    *("steps", "epochs", "eval.*", "engine.*", "train.*", "*.train.*", "placement.reference", "placement.teacher"),
    *("*.lr", "*.schedule", "*.warmup_steps", "*.max_grad_norm", "*.weight_decay", "*.betas", "*.eps"),
    *("*.max_skipped_updates", "rollout.max_new_tokens", "rollout.max_context_tokens", "rollout.max_turns"),
    *("rollout.over_sample", "rollout.max_prompts_per_step", "rollout.claim", "reward.*.timeout"),
    *("env.*.*_timeout", "env.*.retries", "env.*.on_error"),
)
"""Settings that may be tuned during a run, or depend on the machine, as shell patterns"""


def holds_run(folder: Path) -> bool:
    """Return True if a run directory holds a training step, unlike an early crash."""
    if (folder / "checkpoints" / "latest").exists():
        return True
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return any(json.loads(line)["step"] > 0 for line in lines)
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        # An unreadable file may be another program's, which must not be overwritten.
        return True


def continue_run(cfg: Any, pipeline: str) -> list[str]:
    """Compare the settings with those of the run in `run.dir`; return a notice per change.

    `policy.dtype=auto` becomes the run's, in place. UserError for a refused change. A setting that an older run lacks
    is compared with today's default.
    """
    folder = Path(cfg.run.dir)
    saved = saved_config(folder) if holds_run(folder) else None
    if saved is None:
        return []
    about = saved.pop("about", None) or {}
    if about.get("pipeline", pipeline) != pipeline:
        raise UserError(f"run.dir: {folder} holds a run of {about['pipeline']}; choose another run.dir")
    then = dict(flatten(to_dict(type(cfg)()))) | dict(flatten(saved)) | about.get("sources", {})
    notices = []
    if cfg.policy.dtype == "auto" and then["policy.dtype"] != "auto":
        cfg.policy.dtype = then["policy.dtype"]
        notices.append(f"policy.dtype=auto: {cfg.policy.dtype}, as in the steps that {folder} holds")
    now = dict(flatten(to_dict(cfg))) | sources(cfg)
    changed = list(_changes(then, now))
    if refused := [key for key in changed if not _may_change(key)]:
        raise UserError(_refusal(refused[0], then, now, folder))
    return notices + [f"{key}: {_shown(then, key)} before, {_shown(now, key)} from here on" for key in changed]


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    counted = [key for key in (*identity(now), *identity(then)) if key not in ("steps", "epochs")]
    # `steps` follows from `epochs` if these are given, so only one of them is compared.
    horizon = "epochs" if now.get("epochs") else "steps"
    tuned = [key for key in now if key == horizon or key.startswith("eval.")]
    for key in dict.fromkeys([*counted, *tuned]):
        if then.get(key) != now.get(key):
            yield key


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE) and ".args." not in key


def _refusal(key: str, then: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> str:
    line = f"{key}: {folder} was started with {_shown(then, key)}, not {_shown(now, key)}; keep that, "
    latest = folder / "checkpoints" / "latest"
    if not latest.exists():
        return line + "or choose another run.dir"
    checkpoint = latest.with_name(latest.read_text(encoding="utf-8").strip())
    # A checkpoint counts the prompts of its own data, so other data needs a new run from its weights.
    if key.startswith(("data.", "policy.model")):
        return line + f"or start another run with its weights: policy.model={checkpoint}/hf run.dir=NEW"
    return line + f"or start another run from its state: checkpoint.resume={checkpoint} run.dir=NEW"


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "none"
