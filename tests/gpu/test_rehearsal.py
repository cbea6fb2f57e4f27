"""Bodies of the tests on an accelerator, run on the CPU with small shapes: two in `make test`, all among the slow."""

import os
import subprocess
import sys

import pytest

from tests.gpu.machine import ROOT
from tests.patience import patient

TWO = ("a_publish_of_3b", "waits_of_an_update")


def rehearse(folder, seconds: float, *arguments: str) -> str:
    """Run pytest on this folder's tests in a process that sees no device; return the last line of its output."""
    env = {name: value for name, value in os.environ.items() if name != "TEST_RESULTS"}
    env |= {"GPU_TESTS": "rehearse", "CUDA_VISIBLE_DEVICES": "", "OUT": str(folder)}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", "gpu", "--tb=short", "tests/gpu"]
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": patient(seconds)}
    done = subprocess.run([*command, *arguments], **options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert (folder / "gpu.jsonl").stat().st_size
    return done.stdout.rstrip().rpartition("\n")[2]


def test_two_bodies_run_on_the_cpu(tmp_path):
    assert rehearse(tmp_path, 120, "-k", " or ".join(TWO)).startswith("2 passed")


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_all_bodies_run_on_the_cpu(tmp_path):
    assert " passed" in rehearse(tmp_path, 1800)
