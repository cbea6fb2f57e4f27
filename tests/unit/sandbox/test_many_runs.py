"""Many runs, and kills at any moment: as fast and as sure in bubblewrap as in the fork server."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.sandbox.conftest import MAKERS, TIGHT


def test_three_hundred_tests_in_one_check(sandbox):
    tests = [f"assert f({i}) == {i % 7}" for i in range(300)]
    assert sandbox.check("def f(x): return x % 7", tests).passed == (True,) * 300


def test_a_run_costs_a_fork_and_no_start(sandbox):
    """In processor time, ours too: a hundred runs are less than ten starts of the server that forks them."""
    made = MAKERS[sandbox.name]()
    start, begin = processor_time(made), time.process_time()
    outputs = [made.run("print(int(input()) + 1)", str(i)).stdout for i in range(100)]
    runs = processor_time(made) - start + time.process_time() - begin
    made.close()
    assert outputs == [f"{i}\n" for i in range(1, 101)] and 0 < runs < 10 * start, (runs, start)


def processor_time(made) -> float:
    """That of a sandbox's processes, with all that they have started and waited for."""
    used, found = 0.0, [made.process.pid]
    for pid in found:
        found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    return used


@pytest.mark.mounts
def test_a_kill_at_any_moment_is_the_end_of_the_time(sandbox):
    for i in range(64):
        limits = replace(TIGHT, wall_seconds=i / 64 * 0.02)
        assert sandbox.run("import time; time.sleep(9)", limits=limits).end == "wall"
        result = sandbox.check("import time; time.sleep(9)", ["assert f() == 1"], limits=limits)
        assert (result.end, result.passed) == ("wall", ())


def test_children_end_with_a_kill_at_any_moment(sandbox):
    program = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(9)"
    for i in range(16):
        assert sandbox.run(program, limits=replace(TIGHT, processes=16, wall_seconds=i / 16 * 0.03)).end in (
            "wall",
            "exit",
        )
