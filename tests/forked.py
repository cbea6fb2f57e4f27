"""Processes forked from a server that has all of torch and of ours imported: a rank starts in a fraction of a second.

    process = Forked(log, environment, function, *args)     # the function stands at module level
    process.wait(timeout); process.returncode

A rank of its own interpreter spends six CPU-seconds on imports before it does anything. Where a test is about that, or
about what torchrun does, it starts a real one.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class Forked:
    """One such process, with what we use of `subprocess.Popen`."""

    def __init__(self, log: Path, environment: Mapping[str, str], function: Callable[..., None], *args: Any) -> None:
        """Run `function(*args)` with these variables on top of ours; all that it prints is appended to `log`."""
        self._process = _context().Process(target=_child, args=(str(log), dict(environment), function, args))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the signal where one killed it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same as a call."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, or None after so many seconds."""
        self._process.join(timeout)
        return self.returncode


def executor() -> ProcessPoolExecutor:
    """One such process, which does what is submitted to it, in turn, until it is shut down."""
    return ProcessPoolExecutor(1, _context())


def _context() -> BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # the server has one thread, or forking it is not safe
        forkserver.ensure_running()
    return context


def _child(log: str, environment: dict[str, str], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))  # OpenMP has read its variable in the server
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(out, standard)
    sys.stdout.reconfigure(line_buffering=True)
    function(*args)


def rank_environments(store: dist.TCPStore, size: int, per_machine: int | None = None) -> list[dict[str, str]]:
    """What torchrun would tell each rank of a job, with this process's `store` for its own.

    `per_machine`: ranks that take each other for neighbours; the last machine has what is left. By default all.
    """
    per_machine = per_machine or size
    environments = []
    for rank in range(size):
        machine, local_rank = divmod(rank, per_machine)
        mine = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none",
            "WORLD_SIZE": str(size),
            "RANK": str(rank),
            "GROUP_RANK": str(machine),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(min(per_machine, size - machine * per_machine)),
        }
        environments.append(mine)
    return environments


def new_store() -> dist.TCPStore:
    """A store for one job, in this process."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
