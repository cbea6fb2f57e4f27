"""Identity of a run: name, directory, and the settings it was started with.

The same command, or one with more `steps`, resumes its run; settings that change samples or gradients give another
name. `resume.py` decides about changes in an explicit directory. `config.yaml` has the settings as a user writes them,
and `about`: package versions and git revision.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from spmd_rl.base.errors import UserError
from spmd_rl.base.hub import model_folder
from spmd_rl.config.algorithm_targets import sources
from spmd_rl.config.backends import backend
from spmd_rl.config.engines import facts_of
from spmd_rl.config.keys import flatten, to_dict
from spmd_rl.config.known_names import EARLIER, with_present_names
from spmd_rl.config.sections.engine import ENGINES
from spmd_rl.config.sections.models import BACKENDS

CONFIG_FILE = "config.yaml"
WITHOUT_EFFECT_ON_RESULTS = (
    *("run", "track", "publish", "checkpoint", "eval", "journal", "sidecar", "plan", "debug", "profile"),
)
"""Sections and settings that change no samples or gradients"""
KEYS_WITHOUT_EFFECT = ("steps", "epochs", "rollout.dump")

PACKAGES = (
    *("spmd-rl", "torch", "transformers", "safetensors", "numpy", "hydra-core", "omegaconf", "pyzmq", "msgspec"),
    *("math-verify", "reasoning-gym", "peft", "xgrammar"),
)
"""Packages whose versions a run records, besides engines' and backends'"""

T = TypeVar("T")


def identity(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that change samples or gradients, by dotted key.

    Left out are `WITHOUT_EFFECT_ON_RESULTS`, the processes of rewarders and environments, and, if every `schedule` is
    `constant`, `steps` or `epochs`, the horizon of a decaying learning rate. Without training `eval` is included: it
    determines the answers.
    """
    settings = dict(flatten(tree))
    evaluates = "steps" not in settings

    def changes_results(key: str) -> bool:
        endings = (".workers", ".cpus", ".devices", ".start_seconds", ".sandbox", ".mode", ".envs_per_worker")
        endings += (".memory_mb", ".recycle_after")
        of_sidecar = key.startswith(("reward.", "env.")) and not {"args", "eval_args"} & set(key.split("."))
        runs_where = of_sidecar and key.endswith(endings)
        of_run = key in KEYS_WITHOUT_EFFECT or key.split(".")[0] in WITHOUT_EFFECT_ON_RESULTS
        of_answers = key.startswith("eval.") and key not in ("eval.metrics", "eval.pass_score")
        return not (of_run or runs_where) or (evaluates and of_answers)

    kept = {key: value for key, value in settings.items() if changes_results(key)}
    if any(key.endswith(".schedule") and value != "constant" for key, value in kept.items()):
        kept["epochs" if settings.get("epochs") else "steps"] = settings.get("epochs") or settings["steps"]
    return kept


def identity_hash(cfg: Any) -> str:
    """Return 8 hexadecimal digits over the settings' `identity`."""
    # Under earlier names, so that a renamed setting leaves the names of runs as they are.
    earlier = {new: old for old, new in EARLIER.items()}
    settings = {earlier.get(key, key): value for key, value in identity(to_dict(cfg)).items()}
    text = json.dumps(settings | sources(cfg), sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def answers_key(cfg: Any, prompts: str) -> str:
    """Return 16 hexadecimal digits over all that decides an evaluation's answers: settings, weights and `prompts`, a
    digest.

    Weight files count by name, size and time.
    """
    files = [(path.name, path.stat()) for path in sorted(model_folder(cfg.policy.model).glob("*.safetensors"))]
    weights = [[name, found.st_size, found.st_mtime_ns] for name, found in files]
    text = json.dumps([identity_hash(cfg), weights, prompts])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def fill_run(cfg: T, pipeline: str) -> T:
    """Fill in `pipeline`, and missing `run.name` and `run.dir` (absolute); return `cfg`.

    The last part of an explicit `run.dir` is the name.
    """
    run, cfg.pipeline = cfg.run, pipeline
    if run.name is None and run.dir is None:
        run.name = "-".join([_model_name(Path(cfg.policy.model)), cfg.kind, identity_hash(cfg)])
    folder = run_dir(pipeline, run.name or "", run.dir)
    run.name = run.name or folder.name
    run.dir = str(folder)
    return cfg


def _model_name(model: Path) -> str:
    """Return a model path's last part; of a checkpoint's `hf/`, run and step."""
    *_, run, folder, step, last = ("", "", "", *model.parts)
    return f"{run}-{step}" if (folder, last) == ("checkpoints", "hf") else model.name


def run_dir(pipeline: str, name: str, given: str | None) -> Path:
    """Return the absolute directory of run `name`. given: the user's `run.dir`, if any."""
    return Path(given or f"runs/{pipeline}/{name}").expanduser().absolute()


def saved_config(directory: str | Path) -> dict[str, Any] | None:
    """Return the settings of the run in a directory, with `about`; None without a run."""
    path = Path(directory) / CONFIG_FILE
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, UnicodeDecodeError):
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"run.dir: {path} cannot be read; remove it, or choose another run.dir")
    return with_present_names(tree)


def write_config(cfg: Any, directory: str | Path, pipeline: str) -> None:
    """Write `config.yaml` completely or not at all, on rank 0.

    If the directory holds steps of other settings, `about.until` keeps these, with their last step.
    """
    about = {"pipeline": pipeline, "git_revision": git_revision(), "versions": package_versions()}
    if found := sources(cfg):
        about["sources"] = found
    if until := _until(cfg, Path(directory)):
        about["until"] = until
    path = Path(directory) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    # A rename shows the file completely or not at all.
    draft = path.with_suffix(".tmp")
    draft.write_text(to_yaml({**to_dict(cfg), "about": about}))
    os.replace(draft, path)


def _until(cfg: Any, directory: Path) -> list[dict[str, Any]]:
    """Return the settings of earlier steps that `cfg` changes, each with its last step."""
    saved = saved_config(directory) or {}
    latest = directory / "checkpoints" / "latest"
    digits = re.search(r"\d+", latest.read_text()) if saved and latest.exists() else None
    if digits is None:
        return []
    until = list((saved.pop("about", None) or {}).get("until", ()))
    step, now, then = int(digits[0]), identity(to_dict(cfg)), identity(saved)
    changed = {key: then[key] for key in then if key in now and then[key] != now[key]}
    # A start that trained nothing is between the two.
    if until and until[-1]["step"] == step:
        changed |= until.pop()["settings"]
    changed = {key: value for key, value in changed.items() if now.get(key) != value}
    return [*until, {"step": step, "settings": changed}] if changed else until


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Format plain values as YAML, in their order."""
    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=120)


def unused_packages(settings: Mapping[str, Any]) -> set[str]:
    """Return packages of choices (engine, backend) that these settings do not use."""
    chosen = {value for value in settings.values() if isinstance(value, str)}
    unused = {package for name, package in _packages_by_choice().items() if name not in chosen}
    return unused if any(value for key, value in settings.items() if key.endswith("lora.rank")) else {*unused, "peft"}


def _packages_by_choice() -> dict[str, str]:
    engines = {name: facts_of(name).package for name in ENGINES}
    packages = engines | {name: backend(name).package for name in BACKENDS}
    return {name: package for name, package in packages.items() if package}


def package_versions() -> dict[str, str]:
    """Return versions of Python and installed packages, without importing them."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *_packages_by_choice().values()):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Return this clone's commit, with `-dirty` if files differ; None outside a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commands = (
        # In a virtual environment inside another project's clone this file is not tracked.
        ["ls-files", "--error-unmatch", Path(__file__).name],
        ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
    )
    try:
        outputs = [subprocess.run([*git, *c], check=True, capture_output=True, text=True).stdout for c in commands]
    except (OSError, subprocess.CalledProcessError):
        return None
    return outputs[-1].strip()
