"""Isolation of vLLM in this process: variables set before its import, state restored after it."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.base.errors import UserError, one_line
from spmd_rl.engine.guest import undisturbed

FORCED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables that keep vLLM in this process"""

DEFAULTS = {
    # Otherwise vLLM pins the threads that the trainer also computes with.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Otherwise a thread reports usage to vLLM's makers.
    "VLLM_NO_USAGE_STATS": "1",
    # Otherwise vLLM installs log handlers, and a record factory for the whole process.
    "VLLM_CONFIGURE_LOGGING": "0",
}
"""Defaults of variables; a user's value wins"""

# With `pp` above 1 it is the older one: the newer sends no drawn tokens to the first stages.
RUNNERS = {name: {"VLLM_USE_V2_MODEL_RUNNER": value} for name, value in (("cuda", "1"), ("cpu", "0"))}
"""Model runner by device type; otherwise it depends on Triton"""


@contextmanager
def hosted(device_type: str, pp: int = 1) -> Iterator[None]:
    """Import and start vLLM inside; on exit restore the process, except for vLLM's variables and modules."""
    # vLLM would leave behind: LD_PRELOAD, LOCAL_WORLD_SIZE and OpenMP variables for our children, a
    # `torch.set_num_threads` that does nothing, reseeded generators, a frozen heap, another float32 precision.
    os.environ.update(FORCED)
    for name, value in (DEFAULTS | RUNNERS.get(device_type if pp == 1 else "cpu", {})).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    # vLLM's steps at tp > 1 call deprecated functions.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    with undisturbed("VLLM_"):
        try:
            yield
        except ImportError as error:
            # Some models need packages that vLLM itself does not.
            raise UserError(f"engine=vllm: {one_line(error)}") from error
