"""The wheel holds all that a run needs: it trains from a directory where no clone is in sight."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.e2e.runs import ROOT, Toy

PACKAGES = ("spmd_rl", "configs", "rewards", "envs", "launch")
REWARD = """
class Parity:
    def score(self, prompt, answer, info):
        from spmd_rl.types import Verdict
        return Verdict("ok", float(sum(map(ord, answer)) % 2))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, where no `build/` of an earlier day lies about."""
    place = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, place / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / "source")
    pip("wheel", "--no-build-isolation", "--wheel-dir", place, place / "source")
    return next(place.glob("spmd_rl-*.whl"))


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory) -> Path:
    """A directory with `site/`, where the wheel is installed, and nothing of the clone."""
    outside = tmp_path_factory.mktemp("outside")
    pip("install", "--target", outside / "site", wheel)
    (outside / "parity.py").write_text(REWARD)
    return outside


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--no-deps", "--no-index", "--quiet", *arguments[1:]]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def door(outside: Path, *arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": f"{outside / 'site'}:{outside}", "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-m", "spmd_rl.rlvr", *arguments]
    done = subprocess.run(command, cwd=outside, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    kept = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    wanted = {path.relative_to(ROOT).as_posix() for path in kept if "__pycache__" not in path.parts}
    assert wanted <= held
    assert {name.split("/")[0] for name in held if ".dist-info/" not in name} == set(PACKAGES)


def test_it_composes_its_own_settings(outside: Path) -> None:
    """Not those of a clone: its YAML files say so where ours are changed."""
    experiment = outside / "site" / "configs" / "experiment" / "one_step.yaml"
    experiment.write_text("# @package _global_\ndefaults:\n  - override /data: one_digit_sums\nsteps: 1\n")
    cfg = yaml.safe_load(door(outside, "--cfg", "job", "+experiment=one_step", f"policy.model={outside}"))
    assert cfg["steps"] == 1 and cfg["reward"]["reasoning_gym"]["target"].startswith("rewards.")


def test_it_trains_outside_the_clone(outside: Path) -> None:
    toy = Toy(outside / "toy")
    settings = [s for s in toy.settings() if not s.startswith("reward.")]
    door(outside, *settings, "reward.toy.target=parity:Parity", "steps=1", "run.dir=run", "checkpoint.every=0")
    assert (outside / "run" / "metrics.jsonl").read_text().count("\n") == 2
    assert (outside / "run" / "checkpoints" / "step-000001" / "hf" / "model.safetensors").is_file()
    assert sorted(path.name for path in outside.iterdir()) == ["parity.py", "run", "site", "toy"]
