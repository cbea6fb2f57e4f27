"""The doctor over real ranks: what can work here works, and a rank that dies is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import runpy, sys
from spmd_rl.tools.doctor import checks
from spmd_rl.tools.doctor.checks import Check
toy = Check("toy", "tests.unit.doctor_toys:rank_one_dies", "ranks", 60)
checks.CHECKS = (toy, *(check for check in checks.CHECKS if check.name == "training step"))
runpy.run_module("spmd_rl.tools.doctor", run_name="__main__", alter_sys=True)
"""


def doctor(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_everything_works_on_two_ranks(tmp_path: Path) -> None:
    names = "versions,open,run,sidecar,devices,dtype,process,shared,collectives,training,offload,checkpoint,native"
    done = doctor("-m", "spmd_rl", "doctor", f"run.dir={tmp_path}/run", "--only", names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "18 ok, 1 skipped" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_rank_that_dies_in_a_check_is_named_and_the_next_check_runs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = doctor(str(program), f"run.dir={tmp_path}/run")
    text = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert "toy failed" in text and "rank 1 on" in text and "SIGKILL" in text and "the last words" in text
    assert "training step ok" in text
