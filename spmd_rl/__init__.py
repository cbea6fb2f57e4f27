"""Reinforcement learning for language models as one program that every rank runs.

This file only sets environment variables that torch and OpenMP read on loading; the user's values win.
"""

import os

__version__ = "0.1.0"


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _prepare_environment() -> None:
    ranks_per_node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    defaults = {
        # Spinning ranks that share cores run ten times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        # torchrun sets OMP_NUM_THREADS=1 before this file runs.
        "OMP_NUM_THREADS": str(max(1, _usable_cores() // ranks_per_node)),
        # Rows of a float32 product have the same bits in any batch.
        "MKL_CBWR": "AUTO,STRICT",
        "TOKENIZERS_PARALLELISM": "false",
        # The flight recorder would keep a traceback of each collective; the journal already names one that hangs.
        "TORCH_FR_BUFFER_SIZE": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


_prepare_environment()
