"""Checks for the doctor's tests, which misbehave."""

import os
import signal
import sys
import time


def fine(options) -> str:
    return "fine"


def dies(options) -> str:
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(options) -> str:
    time.sleep(60)


def raises(options) -> str:
    raise ValueError("what was wrong")


def rank_one_dies(bench) -> str:
    assert bench.world.size == 2
    if bench.world.rank == 1:
        dies(bench)
    bench.world.barrier("toy")  # [all]
    return "rank 0 came through"
