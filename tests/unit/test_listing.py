"""`python -m spmd_rl`: what there is in one line each, and each of it by its name."""

import subprocess
import sys

import pytest

from spmd_rl.__main__ import MODULES, main
from spmd_rl.config.pipelines import PIPELINES


def test_it_lists_each_with_a_line_and_imports_none() -> None:
    code = "import runpy, sys\nsys.argv = ['spmd_rl']\ntry:\n    runpy.run_module('spmd_rl', run_name='__main__')\n"
    code += "except SystemExit as end:\n    sys.exit(end.code or 'torch' in sys.modules or 'hydra' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("  ")}
    assert set(lines) == set(MODULES) > set(PIPELINES)
    assert all(len(line.split()) > 5 for line in lines.values())


@pytest.mark.parametrize("name", ["rlvr", "sidecar", "report", "sidecar_keys"])
def test_it_runs_what_is_named(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", "spmd_rl", name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout


def test_an_unknown_name_is_one_line_with_the_nearest(capsys, monkeypatch) -> None:
    for given, near in (("doktor", "doctor"), ("steps=5", f"one of {', '.join(MODULES)}")):
        monkeypatch.setattr(sys, "argv", ["spmd_rl", given])
        assert main() == 2
        assert capsys.readouterr().err == f"error: {given}: no such pipeline or tool; did you mean {near}?\n"
