"""Every benchmark of `make bench` at its smallest size on a tiny model, in the environments that its set-up makes.

That it runs to its end and writes its figures, on any machine; the figures themselves are no test's.
"""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from bench.work import ROOT
from tests.models import tiny

TRL_PYTHON = ROOT / ".venv-trl/bin/python"
SMALLEST = {
    "publish": "--ranks 1 --steps 1",
    "coordination": "--ranks 1 --prompts 8 --rounds 1 --steps 1",
    "bare": "--steps 1",
    "against_trl": "--ranks 1 --engines native --steps 1",
    "to_score": "--ranks 1 --steps 1 --target 0",
}
WITH_TRL = ("against_trl", "to_score")
CODE = """
import importlib, sys
for name in ("spmd_rl.base.targets", "spmd_rl.types", "bench.gate", "rewards.reasoning_gym"):
    importlib.import_module(name)
print(*(m.__file__ for name, m in sys.modules.items() if name.partition(".")[0] in ("spmd_rl", "rewards", "tests")))
"""
"""The files of ours that TRL's side imports."""


def test_it_runs_all_that_make_bench_does() -> None:
    (line,) = re.findall(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(line.split()) == set(SMALLEST)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_size(name: str, tmp_path: Path) -> None:
    if name in WITH_TRL and not TRL_PYTHON.exists():
        pytest.skip("needs `make setup-bench`")
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    command = [sys.executable, "-m", f"bench.{name}", *SMALLEST[name].split(), "--dir", str(tmp_path / "runs")]
    command += ["--json", str(figures), "--svg", str(picture), f"policy.model={tiny('llama', tmp_path / 'model')}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(figures.read_text())["benchmark"] == name
    assert picture.read_text().startswith("<svg") and done.stdout.strip()


def test_trls_environment_has_what_its_side_imports_of_ours() -> None:
    """An import that `trl.txt` does not bring would be noticed only by who runs the benchmark."""
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for path in done.stdout.split() for name in imports(Path(path))}
    owners = packages_distributions()
    needed = {normal(owners[name][0]) for name in imported if name in owners} - {"spmd-rl"}
    lines = (ROOT / "bench/trl.txt").read_text().splitlines()
    assert {"msgspec", "reasoning-gym"} <= needed <= {normal(line.partition("==")[0]) for line in lines}


def imports(path: Path) -> set[str]:
    """The modules that a file imports as soon as it is imported."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
