"""Reinforcement learning for language models as one program that every rank runs.

This file only sets environment variables that torch and OpenMP read as they are loaded; a value of the user's wins.
"""

import os

__version__ = "0.1.0"


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _prepare_environment() -> None:
    ranks_per_node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    defaults = {
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning ranks that share cores run ten times slower
        "OMP_NUM_THREADS": str(max(1, _usable_cores() // ranks_per_node)),  # torchrun sets 1 before we are asked
        "MKL_CBWR": "AUTO,STRICT",  # a float32 product's rows have the same bits whatever rows stand beside them
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_FR_BUFFER_SIZE": "0",  # a traceback kept of each collective: the journal names one that hangs
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


_prepare_environment()
