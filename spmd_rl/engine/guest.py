"""Isolation of an engine's package: state of our process that it may not change permanently."""

import gc
import logging
import multiprocessing
import os
import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def undisturbed(prefix: str) -> Iterator[None]:
    """Import and start a package inside; on exit restore the process, except for its variables and modules.

    Restored are environment variables (those that begin with `prefix` stay), signal handlers, the start method of
    processes, the number of threads, random generators, the heap, the float32 precision and logging.
    """
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    start_method = multiprocessing.get_start_method(allow_none=True)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    states = random.getstate(), numpy.random.get_state()
    muted = logging.root.manager.disable
    # torch warns of packages that an engine looks for and does not need.
    logging.disable(max(muted, logging.WARNING))
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
        multiprocessing.set_start_method(start_method, force=True)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        for name in [name for name in os.environ if not name.startswith(prefix)]:
            if name not in environment:
                del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if not name.startswith(prefix)})


def _devices() -> dict:
    """Return arguments of `fork_rng` for this process's accelerator, if it has one."""
    if not torch.accelerator.is_available():
        return {"devices": []}
    device = torch.accelerator.current_accelerator()
    return {"devices": [torch.accelerator.current_device_index()], "device_type": device.type}
