"""vLLM as a guest in our process: what it is given before it is imported, and what it may not change for good.

Left out: the engine itself (`start.py`). Nothing here imports vLLM.
"""

import gc
import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

FORCED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""In-process is what this engine is."""

DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it pins the threads that the trainer computes with
    "VLLM_NO_USAGE_STATS": "1",  # else a thread reports to its makers
    "VLLM_CONFIGURE_LOGGING": "0",  # else its own handlers, and a record factory for the whole process
}
"""A user's own value wins."""

RUNNERS = {name: {"VLLM_USE_V2_MODEL_RUNNER": value} for name, value in (("cuda", "1"), ("cpu", "0"))}
"""By type of device, like `DEFAULTS`: which model runner. Unsaid, that would depend on whether Triton is there."""


@contextmanager
def hosted(device_type: str) -> Iterator[None]:
    """Import and start vLLM inside; afterwards the process is as it was, vLLM's own variables and modules aside.

    It would otherwise leave behind: LD_PRELOAD, LOCAL_WORLD_SIZE and OpenMP variables for our children, a
    `torch.set_num_threads` that does nothing, reseeded generators, a frozen heap, another float32 precision.
    """
    os.environ.update(FORCED)
    for name, value in (DEFAULTS | RUNNERS.get(device_type, {})).items():
        os.environ.setdefault(name, value)
    environment = dict(os.environ)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    states = random.getstate(), numpy.random.get_state()
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # its steps at tp > 1
    muted = logging.root.manager.disable
    logging.disable(max(muted, logging.WARNING))  # torch speaks of what vLLM looks for and does not need
    try:
        with torch.random.fork_rng(**_devices()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(muted)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        gc.unfreeze()
        for name in [name for name in os.environ if not name.startswith("VLLM_")]:
            if name not in environment:
                del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if not name.startswith("VLLM_")})


def _devices() -> dict:
    """Arguments of `fork_rng`: this process's accelerator, if it has one."""
    if not torch.accelerator.is_available():
        return {"devices": []}
    device = torch.accelerator.current_accelerator()
    return {"devices": [torch.accelerator.current_device_index()], "device_type": device.type}
