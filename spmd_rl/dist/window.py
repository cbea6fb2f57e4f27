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

import torch
from torch import Tensor

from spmd_rl.dist.world import World


class SharedWindow:
    """Two halves in turn: while one is read, the next is written, and one meeting a turn keeps them apart."""

    def __init__(self, memory: Tensor, meet: Callable[[], object]) -> None:
        self._halves, self._meet = memory.chunk(2), meet

    @classmethod
    def open(cls, world: World, num_bytes: int, meet: Callable[[], object] | None = None) -> "SharedWindow | None":
        """[all] Two halves of `num_bytes` each; None where ranks share no memory, or the machine has none to spare.

        `meet`: how all ranks meet over it; by default at a named barrier.
        """
        if not cls.possible(world):
            return None
        fd = _reserve(2 * num_bytes) if world.rank == 0 else None
        path = world.broadcast("window: open", fd and f"/proc/{os.getpid()}/fd/{fd}")  # [all]
        if path is None:
            return None
        memory = torch.from_file(path, shared=True, size=2 * num_bytes, dtype=torch.uint8)
        world.barrier("window: mapped")  # [all]
        if fd is not None:
            os.close(fd)
        return cls(memory, meet or partial(world.barrier, "window: meet"))

    @staticmethod
    def possible(world: World) -> bool:
        """Whether all ranks are CPU ranks of one machine that can; the same on all of them."""
        return world.device.type == "cpu" and 1 < world.size == world.local_size and sys.platform == "linux"

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
