"""A run of tests ends, whatever a test does or leaves open, and what failed is said at its end."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.patience import patient

ROOT = Path(__file__).parents[2]
BAD = "tests/unit/ends_badly.py::test_"
RUN = ("-m", "tests.parts")
RUN_TO_THE_MARK = """
import os, sys, time
from tests import parts
now, mark = time.time, os.environ["HOST_PID"]
time.time = lambda: now() + (2000 if os.path.exists(mark) and os.path.getsize(mark) else 0)
sys.exit(parts.run(*sys.argv[2:3], sys.argv[3:]))
"""
"""Does the same by a clock on which it is late once the test has come to its end: no machine is too slow for that."""


UNLIMITED = """
import sys
from tests import parts
parts.LIMIT_SECONDS = 1e5
sys.exit(parts.run(sys.argv[2], sys.argv[3:]))
"""


def parts(
    tmp_path: Path, *words: str, start: Sequence[str] = RUN, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python -m tests.parts` does, in less than a minute."""
    mine = {"TEST_PARTS": str(tmp_path), "HOST_PID": str(tmp_path / "host"), "TEST_PATIENCE": "1"} | environment
    return subprocess.run(
        [sys.executable, *start, *words],
        cwd=ROOT,
        env=os.environ | mine,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )


@pytest.mark.parametrize("engine", ["native", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_failed_test_leaves_nothing_that_waits(engine: str, tmp_path: Path) -> None:
    name = f"{BAD}fails_with_a_{engine}_engine"
    done = parts(tmp_path, "run", "bad", name)
    assert done.returncode == 1 and f"FAILED {name}" in done.stdout, done.stdout + done.stderr
    assert "Timeout" not in done.stderr, "it ended by itself"
    assert not psutil.pid_exists(int((tmp_path / "host").read_text()))
    parts(tmp_path, "run", "good", "tests/unit/test_notice.py")
    total = parts(tmp_path, "sum", "good", "bad", "missing")
    assert total.returncode == 1
    failed = [line.strip() for line in total.stdout.partition("What failed:")[2].splitlines()]
    assert failed[1].startswith(f"bad: {name} AssertionError: on purpose")
    assert failed[2] == "missing: did not run; its last test: none"
    assert total.stdout.splitlines()[-1].endswith(" passed, 2 failed")
    assert parts(tmp_path, "sum", "good").returncode == 0


def test_a_part_that_hangs_is_ended_and_shows_where(tmp_path: Path) -> None:
    until, start = str(time.time() + 1000), ("-c", RUN_TO_THE_MARK)
    done = parts(tmp_path, "run", "bad", BAD + "hangs", start=start, TEST_UNTIL=until, TEST_PATIENCE="9")
    assert done.returncode == 124
    assert "in test_hangs" in done.stderr and "-m spmd_rl.sidecar" in done.stdout, done.stdout + done.stderr
    assert not psutil.pid_exists(int((tmp_path / "host").read_text()))
    total = parts(tmp_path, "sum", "bad")
    assert "bad: ended by the limit of a part" in total.stdout and f"its last test: {BAD}hangs" in total.stdout
    assert total.stdout.splitlines()[-1] == "0 passed, 1 failed" and total.returncode == 1


def test_an_interpreter_that_does_not_end_is_ended(tmp_path: Path) -> None:
    done = parts(tmp_path, "run", "bad", BAD + "leaves_a_thread", start=("-c", UNLIMITED), TEST_PATIENCE="0.1")
    assert done.returncode == 1 and "1 passed" in done.stdout and "Timeout" in done.stderr
    total = parts(tmp_path, "sum", "bad")
    assert f"bad: exit code 1; its last test: {BAD}leaves_a_thread" in total.stdout
    assert total.stdout.splitlines()[-1] == "1 passed, 1 failed"


def test_the_end_names_the_programs_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(
        "skipped\ta\tno Chromium on this machine\nskipped\tb\tbwrap: bwrap is not installed\n"
        "skipped\tc\tbwrap: no namespaces\npassed\td\t\nskipped\te\tneeds root\nended\texit code 0\n"
    )
    lines = parts(tmp_path, "sum", "one").stdout.splitlines()
    assert lines[-2:] == [
        "skipped for want of a program: bubblewrap 2, chromium 1; apt-get install bubblewrap chromium",
        "1 passed, 0 failed",
    ]
