"""Start of other packages' engines: isolation of process state, a check of `engine.args`, and a replica's group as
the default one."""

import gc
import inspect
import logging
import multiprocessing
import os
import random
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from spmd_rl.base.errors import UserError


@contextmanager
def undisturbed(prefix: str) -> Iterator[None]:
    """Import and start a package inside; on exit restore the process, except for its variables and modules.

    Restored are environment variables (without those that begin with `prefix`), signal handlers, the start method of
    processes, number of threads, random generators, heap, float32 precision and logging.
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
    if not torch.accelerator.is_available():
        return {"devices": []}
    device = torch.accelerator.current_accelerator()
    return {"devices": [torch.accelerator.current_device_index()], "device_type": device.type}


def check_args(
    args: Mapping[str, Any],
    of: type,
    ours: Mapping[str, str],
    required: Mapping[str, Any],
    reasons: Mapping[str, str] | None = None,
) -> None:
    """Raise UserError for an argument that is unknown, that a setting decides, or that this program fixes.

    of: class of the arguments. ours: argument -> deciding setting. required: argument -> fixed value. reasons: argument
    -> reason for it.
    """
    known = inspect.signature(of).parameters
    for name in args:
        if name not in known:
            raise UserError(f"engine.args.{name}: {of.__module__.split('.')[0]}'s {of.__name__} has no such argument")
        if name in ours:
            raise UserError(f"engine.args.{name}: decided by {ours[name]}; leave it out")
        if name in required:
            reason = (reasons or {}).get(name, "which the engine needs")
            raise UserError(f"engine.args.{name}: must be {required[name]!r}, {reason}")


@contextmanager
def as_world(replica: dist.ProcessGroup) -> Iterator[None]:
    """Make the group the default one inside."""
    # Engines form groups over the default group's ranks, for all possible replicas and with collectives of all ranks:
    # tens of thousands in a large job, of which a replica needs only its own.
    default = distributed_c10d._get_default_group()
    distributed_c10d._update_default_pg(replica)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(default)
