"""Checks for the doctor's tests, which misbehave."""

import os
import signal
import sys
import time


def fine(cfg) -> str:
    return "fine"


def dies(cfg) -> str:
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(cfg) -> str:
    time.sleep(60)


def raises(cfg) -> str:
    raise ValueError("what was wrong")


def rank_one_dies(bench) -> str:
    assert bench.world.size == 2
    if bench.world.rank == 1:
        dies(bench)
    bench.world.barrier("toy")  # [all]
    return "rank 0 came through"
