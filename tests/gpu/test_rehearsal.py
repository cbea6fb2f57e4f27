"""Bodies of the tests on an accelerator, run on the CPU with small shapes: two in `make test`, all among the slow."""

import os
import subprocess
import sys

import pytest

from tests.gpu.machine import ROOT
from tests.patience import patient

PYTEST = ("-m", "pytest", "-o", "addopts=", "-q", "-m", "gpu", "--tb=short", "tests/gpu")
TWO = ("a_publish_of_3b", "waits_of_an_update")


def rehearse(folder, seconds: float, *arguments: str) -> str:
    """Run a Python program in a process that sees no device; return its output. It must end well and leave figures."""
    env = {name: value for name, value in os.environ.items() if name != "TEST_RESULTS"}
    env |= {"GPU_TESTS": "rehearse", "CUDA_VISIBLE_DEVICES": "", "OUT": str(folder)}
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": patient(seconds)}
    done = subprocess.run([sys.executable, *arguments], **options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert (folder / "gpu.jsonl").stat().st_size
    return done.stdout


def test_two_bodies_run_on_the_cpu(tmp_path):
    assert "\n2 passed" in rehearse(tmp_path, 120, *PYTEST, "-k", " or ".join(TWO))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_all_bodies_run_on_the_cpu(tmp_path):
    assert " passed" in rehearse(tmp_path, 1800, *PYTEST)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_check_of_a_card_runs_on_the_cpu(tmp_path):
    check = ("-m", "bench.gpu.check", "--dir", str(tmp_path / "out"))
    table = rehearse(tmp_path / "out", 2400, *check).partition("A rehearsal on the CPU")[2]
    assert "| bitwise " in table and "FAILED" not in table
