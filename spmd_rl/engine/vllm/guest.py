"""vLLM as a guest in our process: what it is given before it is imported, and what it may not change for good.

Left out: the engine itself (`start.py`). Nothing here imports vLLM.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.engine.guest import undisturbed

FORCED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""In-process is what this engine is."""

DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it pins the threads that the trainer computes with
    "VLLM_NO_USAGE_STATS": "1",  # else a thread reports to its makers
    "VLLM_CONFIGURE_LOGGING": "0",  # else its own handlers, and a record factory for the whole process
}
"""A user's own value wins."""

RUNNERS = {name: {"VLLM_USE_V2_MODEL_RUNNER": value} for name, value in (("cuda", "1"), ("cpu", "0"))}
"""By type of device, like `DEFAULTS`: which model runner. Unsaid, that would depend on whether Triton is there.

Where `pp` is above 1 it is the older one: the newer one does not tell the first stages what the last one has drawn."""


@contextmanager
def hosted(device_type: str, pp: int = 1) -> Iterator[None]:
    """Import and start vLLM inside; afterwards the process is as it was, vLLM's own variables and modules aside.

    It would otherwise leave behind: LD_PRELOAD, LOCAL_WORLD_SIZE and OpenMP variables for our children, a
    `torch.set_num_threads` that does nothing, reseeded generators, a frozen heap, another float32 precision.
    """
    os.environ.update(FORCED)
    for name, value in (DEFAULTS | RUNNERS.get(device_type if pp == 1 else "cpu", {})).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # its steps at tp > 1
    with undisturbed("VLLM_"):
        yield
