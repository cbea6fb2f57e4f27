"""What makes a run the same run: its name, its directory, and the settings it was started with.

The same line typed twice, or typed again with more `steps`, resumes its run; a line that would change samples or
gradients is another run. `config.yaml` in the run's directory holds the settings as a user writes them, and under
`about` the package versions and the git revision. Left out: who calls (rank 0 alone writes) and when.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from spmd_rl.config.keys import flatten, plain
from spmd_rl.errors import UserError

CONFIG_FILE = "config.yaml"
HARMLESS = ("run", "track", "publish", "checkpoint", "eval", "journal", "sidecar", "debug", "profile")
"""Sections and settings that change neither samples nor gradients."""

PACKAGES = (
    *("spmd-rl", "torch", "transformers", "safetensors", "numpy", "hydra-core", "omegaconf", "pyzmq", "msgspec"),
    *("math-verify", "reasoning-gym", "vllm", "sglang", "megatron-core", "deepspeed", "peft"),
)

T = TypeVar("T")


def identity(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Of a tree of settings, those that change samples or gradients, by dotted key.

    All but `HARMLESS`, where and by how many processes rewarders run, and `steps`. Where a learning rate decays,
    `steps` is its horizon and changes every gradient: it counts, unless every `schedule` is `constant`.
    """
    settings = dict(flatten(tree))

    def counts(key: str) -> bool:
        endings = (".workers", ".cpus", ".devices", ".start_seconds", ".sandbox")
        where = key.startswith("reward.") and key.endswith(endings) and ".args." not in key
        return key != "steps" and key.split(".")[0] not in HARMLESS and not where

    kept = {key: value for key, value in settings.items() if counts(key)}
    if any(key.endswith(".schedule") and value != "constant" for key, value in kept.items()):
        kept["steps"] = settings["steps"]
    return kept


def digest(cfg: Any) -> str:
    """8 hex digits over `identity`."""
    text = json.dumps(identity(plain(cfg)), sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def settle(cfg: T, pipeline: str) -> T:
    """Fill in `run.name` and `run.dir` (made absolute) where the user left them open. Returns `cfg`."""
    run = cfg.run
    if run.name is None:
        parts = [Path(cfg.policy.model).name, getattr(getattr(cfg, "algorithm", None), "name", pipeline), digest(cfg)]
        run.name = "-".join(parts)
    run.dir = str(run_dir(pipeline, run.name, run.dir))
    return cfg


def run_dir(pipeline: str, name: str, given: str | None) -> Path:
    """The absolute directory of the run called `name`."""
    return Path(given or f"runs/{pipeline}/{name}").expanduser().absolute()


def saved_config(directory: str | Path) -> dict[str, Any] | None:
    """The settings an existing run was started with, `about` included; None where no run has been."""
    path = Path(directory) / CONFIG_FILE
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, UnicodeDecodeError):
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"run.dir: {path} cannot be read; remove it, or choose another run.dir")
    return tree


def refuse_other_run(cfg: Any, pipeline: str) -> None:
    """A `UserError` if `run.dir` holds a run of other settings, naming the first that differs.

    A setting that the older run does not know is compared with today's default.
    """
    saved = saved_config(cfg.run.dir)
    if saved is None:
        return
    about = saved.pop("about", None) or {}
    if about.get("pipeline", pipeline) != pipeline:
        raise UserError(f"run.dir: {cfg.run.dir} holds a run of {about['pipeline']}; choose another run.dir")
    now = identity(plain(cfg))
    then = identity(dict(flatten(plain(type(cfg)()))) | dict(flatten(saved)))
    for key in [*now, *(key for key in then if key not in now)]:
        old, new = then.get(key, "absent"), now.get(key, "absent")
        if old != new:
            raise UserError(
                f"{key}: {cfg.run.dir} was started with {old!r}, not {new!r}; take that, or choose another run.dir"
            )


def write_config(cfg: Any, directory: str | Path, pipeline: str) -> None:
    """Write `config.yaml` whole. For rank 0 alone."""
    about = {"pipeline": pipeline, "git_revision": git_revision(), "versions": versions()}
    path = Path(directory) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(to_yaml({**plain(cfg), "about": about}))
    os.replace(draft, path)


def to_yaml(tree: Mapping[str, Any]) -> str:
    """A tree of plain values as YAML, in its own order."""
    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=120)


def versions() -> dict[str, str]:
    """Python and whatever of `PACKAGES` is installed; nothing is imported."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """The commit this package is a clone of, with `-dirty` if files differ; None outside a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # In a virtual environment inside someone else's clone our files are not tracked.
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], check=True, capture_output=True)
        told = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()
