"""Shared memory between a machine's ranks, and their rendezvous: base of the `shm` backend.

    memory = SharedMemory(store, rank, size)   # [all]
    memory.publish(tensors)                    # [all] copies them into shared memory; returns when all ranks have
    memory.read(peer, offset, like)            # a peer's published tensor

Each rank owns an anonymous file (memfd) that disappears with its last mapping, so a killed run leaves nothing behind.
Its two halves are used in turn: a rank at a rendezvous has read all of the last one. Ranks wait in process-shared POSIX
semaphores, and check that the awaited rank is alive.
"""

import ctypes
import errno
import os
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.base.errors import RunFailed
from spmd_rl.base.process import running

ALIGNMENT = 64
"""Alignment of published tensors, in bytes"""
# sem_t has 32 bytes in 64-bit glibc; one cache line for each keeps ranks from sharing lines.
_SEMAPHORE_BYTES = 64
_LEAST_BYTES = 1 << 16
_POLL_SECONDS = 0.02
# Numbers that a rank reports about its file, for each half: earlier files, descriptor, bytes.
_FIELDS = 3


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Semaphores:
    """Semaphores of each ordered pair of ranks, in shared memory."""

    def __init__(self, memory: Tensor, rank: int, pids: Sequence[int]) -> None:
        self._memory, self._pids, size = memory, pids, len(pids)
        self._libc = ctypes.CDLL(None, use_errno=True)
        addresses = [
            [memory.data_ptr() + (begin * size + end) * _SEMAPHORE_BYTES for end in range(size)]
            for begin in range(size)
        ]
        self._all = [ctypes.c_void_p(address) for row in addresses for address in row]
        peers = [peer for peer in range(size) if peer != rank]
        self._outgoing = [ctypes.c_void_p(addresses[rank][peer]) for peer in peers]
        self._incoming = [(peer, ctypes.c_void_p(addresses[peer][rank])) for peer in peers]
        self._deadline = _Timespec()

    def create(self) -> None:
        """Initialise the semaphores, on one rank before others use them."""
        for semaphore in self._all:
            if self._libc.sem_init(semaphore, 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init")

    def meet(self) -> None:
        """[all] Wait for all ranks. ConnectionError if a rank is dead."""
        for semaphore in self._outgoing:
            self._libc.sem_post(semaphore)
        for peer, semaphore in self._incoming:
            # `trywait` first: a peer that has arrived costs no system call.
            if self._libc.sem_trywait(semaphore):
                self._wait(peer, semaphore)

    def _wait(self, peer: int, semaphore: ctypes.c_void_p) -> None:
        while True:
            until = time.time() + _POLL_SECONDS
            self._deadline.seconds, self._deadline.nanoseconds = int(until), int(until % 1 * 1e9)
            if not self._libc.sem_timedwait(semaphore, ctypes.byref(self._deadline)):
                return
            if ctypes.get_errno() == errno.ETIMEDOUT and not running(self._pids[peer]):
                # It may have come after the time was over, and ended in order since.
                if not self._libc.sem_trywait(semaphore):
                    return
                raise ConnectionError(f"rank {peer} of this group, pid {self._pids[peer]}, is gone")


class SharedMemory:
    """One rank's view of the shared memory."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        """[all] Map the group's memory. store: private to this group."""
        self._rank, self._size = rank, size
        semaphore_bytes = _SEMAPHORE_BYTES * size * size
        num_bytes = semaphore_bytes + 8 * size * 2 * _FIELDS
        fd = _create(num_bytes) if rank == 0 else None
        store.set(f"pid/{rank}", str(os.getpid()))
        self._pids = [int(store.get(f"pid/{peer}")) for peer in range(size)]
        if fd is not None:
            path = f"/proc/{os.getpid()}/fd/{fd}"
            memory = _map(path, num_bytes)
            self._semaphores = Semaphores(memory, rank, self._pids)
            self._semaphores.create()
            store.set("control", path)
        else:
            memory = _map(store.get("control").decode(), num_bytes)
            self._semaphores = Semaphores(memory, rank, self._pids)
        self._said = memory[semaphore_bytes:].view(torch.int64).numpy().reshape(2, size, _FIELDS)
        self._num_files, self._capacity, self._turn = 0, 0, 0
        self._fd: int | None = None
        self._outgrown: list[int] = []
        self._files: list[tuple[int, tuple[Tensor, ...]]] = [(0, ()) for _ in range(size)]
        self._semaphores.meet()  # [all]
        # All ranks have mapped the memory, which the kernel frees with the last mapping.
        if fd is not None:
            os.close(fd)

    def publish(self, tensors: Sequence[Tensor]) -> None:
        """[all] Copy `tensors` end to end into shared memory, readable until the next call but one.

        Number and shapes may differ by rank.
        """
        self._turn += 1
        offsets, need = layout(tensors)
        if need > self._capacity:
            self._grow(need)
        if need:
            half = self._files[self._rank][1][self._turn % 2]
            for offset, tensor in zip(offsets, tensors, strict=True):
                _view(half, offset, tensor).copy_(tensor)
        self._said[self._turn % 2, self._rank] = self._num_files, -1 if self._fd is None else self._fd, self._capacity
        self._semaphores.meet()  # [all]
        # All ranks have arrived here, hence have finished reading the smaller file.
        for fd in self._outgrown:
            os.close(fd)
        self._outgrown.clear()

    def read(self, peer: int, offset: int, like: Tensor) -> Tensor:
        """Return a peer's tensor at `offset`, in the shape and dtype of `like`, without a copy."""
        if not like.numel():
            return like
        num_files, fd, capacity = self._said[self._turn % 2, peer].tolist()
        if self._files[peer][0] != num_files:
            self._files[peer] = num_files, _map(f"/proc/{self._pids[peer]}/fd/{fd}", 2 * capacity).chunk(2)
        return _view(self._files[peer][1][self._turn % 2], offset, like)

    def close(self) -> None:
        """Close this rank's files; mappings stay valid."""
        for fd in [*self._outgrown, *([] if self._fd is None else [self._fd])]:
            os.close(fd)
        self._outgrown, self._fd = [], None

    def _grow(self, need: int) -> None:
        # Powers of two, so that growing sizes need few files.
        capacity = max(_LEAST_BYTES, 1 << (need - 1).bit_length())
        if self._fd is not None:
            self._outgrown.append(self._fd)
        self._fd, self._capacity = _create(2 * capacity), capacity
        self._num_files += 1
        halves = _map(f"/proc/self/fd/{self._fd}", 2 * capacity).chunk(2)
        self._files[self._rank] = self._num_files, halves


def layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return offsets of published tensors, and their bytes in all."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    ends = np.cumsum([0, *sizes]).tolist()
    return ends[:-1], ends[-1]


def _view(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _create(num_bytes: int) -> int:
    fd = os.memfd_create("spmd_rl")
    # Without the reservation a shortage of memory would be a SIGBUS at some later write.
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        raise RunFailed(f"no {num_bytes >> 20} MiB of memory to share with the other ranks: {error}") from None
    return fd


def _map(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
