"""`python -m spmd_rl`: what there is in one line each, and each of it by its name."""

import subprocess
import sys

import pytest

from spmd_rl.__main__ import PIPELINES, TOOLS, main
from spmd_rl.config import schema


def test_it_lists_each_with_a_line_and_imports_none() -> None:
    code = "import runpy, sys\nsys.argv = ['spmd_rl']\ntry:\n    runpy.run_module('spmd_rl', run_name='__main__')\n"
    code += "except SystemExit as end:\n    sys.exit(end.code or 'torch' in sys.modules or 'hydra' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("  ")}
    assert {*PIPELINES, *TOOLS} <= set(lines) and set(PIPELINES) == set(schema.PIPELINES)
    assert all(len(lines[name].split()) > 5 for name in (*PIPELINES, *TOOLS))


@pytest.mark.parametrize("name", ["rlvr", "sidecar", "report", "sidecar_keys"])
def test_it_runs_what_is_named(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", "spmd_rl", name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout


def test_an_unknown_name_is_one_line_with_the_nearest(capsys) -> None:
    assert main(["doktor"]) == 2
    assert capsys.readouterr().err == "error: doktor: no pipeline or tool; did you mean doctor?\n"
    assert main(["steps=5"]) == 2
    assert "known: rlvr, agentic, doctor, " in capsys.readouterr().err
