"""`SharedWindow`: memory that all ranks of one machine see, for bytes too many to push through a loopback socket.

    window = SharedWindow.open(world, num_bytes)  # [all] None unless all ranks are CPU ranks of one node
    half = window.half(turn)                      # write this rank's part
    window.meet()                                 # [all] now every part may be read, until two turns later

An anonymous file (memfd) that dies with its last mapping: no name, nothing left behind by a killed run.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """What is needed of a `World`."""

    rank: int
    size: int
    local_size: int
    device: torch.device

    def gather(self, name: str, record: Any) -> list[Any]:
        """[all] Each rank's record."""
        ...

    def broadcast(self, name: str, record: Any) -> Any:
        """[all] The record of rank 0."""
        ...

    def agree(self, name: str, value: Any) -> None:
        """[all] RunFailed on all ranks unless they have the same."""
        ...

    def barrier(self, name: str) -> None:
        """[all] Nobody returns before all have come."""
        ...


class SharedWindow:
    """Two halves in turn: while one is read, the next is written, and one meeting a turn keeps them apart."""

    def __init__(self, memory: Tensor, meet: Callable[[], object]) -> None:
        self._halves, self._meet = memory.chunk(2), meet

    @classmethod
    def open(
        cls, world: Ranks, num_bytes: int, meet: Callable[[], object] | None = None, host: bool = False
    ) -> "SharedWindow | None":
        """[all] Two halves of `num_bytes` each; None where ranks share no memory, or the machine has none to spare.

        `meet`: how all ranks meet over it; by default at a named barrier. `host`: see `possible`.
        """
        if not cls.possible(world, host):
            return None
        fd = _reserve(2 * num_bytes) if world.rank == 0 else None
        path = world.broadcast("window: open", fd and f"/proc/{os.getpid()}/fd/{fd}")  # [all]
        if path is None:
            return None
        memory = _map(path, 2 * num_bytes)
        mapped = world.gather("window: mapped", memory is not None)  # [all]
        if fd is not None:
            os.close(fd)
        return cls(memory, meet or partial(world.barrier, "window: meet")) if all(mapped) else None

    @staticmethod
    def possible(world: Ranks, host: bool = False) -> bool:
        """Whether all ranks are CPU ranks of one machine that can; the same on all of them.

        `host`: for what lies in the host's memory whatever the ranks' device is.
        """
        on_host = host or world.device.type == "cpu"
        return on_host and 1 < world.size == world.local_size and sys.platform == "linux"

    def half(self, turn: int) -> Tensor:
        """uint8 [num_bytes]"""
        return self._halves[turn % 2]

    def meet(self) -> None:
        """[all] All ranks have written their part of this turn, and have done with what they read in the last."""
        self._meet()


def _reserve(num_bytes: int) -> int | None:
    """A file of memory, or None: without the reservation a shortage would be a SIGBUS at some later write."""
    fd = os.memfd_create("spmd_rl-window")
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        return None
    return fd


def _map(path: str, num_bytes: int) -> Tensor | None:
    """The file as a tensor; None where another process's is not to be had."""
    try:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError:
        return None
