"""Peak memory of each phase: the accelerator's allocator where there is one, else this process's resident set.

A phase's peak includes the phases nested in it. Left out: other processes (sidecars) and the host side of a GPU run.
"""

import os
import resource
import time

import torch

MOMENT = 0.01
"""Seconds within which a resident set has no peaks worth telling."""
PAGE = resource.getpagesize()
_BRIEF = "coordination"
"""Too short and too frequent to be measured by itself: it counts as part of the phase around it."""


class PhaseMemory:
    """Told of every phase entered and left, remembers the highest use of memory in between, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._on_accelerator = device.type != "cpu"
        self._resident = ResidentPeak()
        self._open: list[str] = []
        self._peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """A phase begins, inside those that are open."""
        if phase != _BRIEF:
            self._settle()
            self._open.append(phase)

    def exit(self, phase: str) -> None:
        """The innermost phase ends."""
        if phase != _BRIEF:
            self._settle()
            left = self._open.pop()
            assert left == phase, f"phase {left} left as {phase}"

    def take(self) -> dict[str, int]:
        """Peak bytes by phase since the last call."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _settle(self) -> None:
        """Charge the peak since the last event to the open phases, and start a new one."""
        peak = self._accelerator_peak() if self._on_accelerator else self._resident.take()
        for phase in self._open:
            self._peaks[phase] = max(peak, self._peaks.get(phase, 0))

    def _accelerator_peak(self) -> int:
        peak = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        return peak


class ResidentPeak:
    """Highest resident set of this process since it was last asked; the present one if that was a moment ago.

    The kernel takes 60 us to tell the highest, and phases may follow each other closely.
    """

    def __init__(self) -> None:
        self._status = _opened("/proc/self/status", os.O_RDONLY)
        self._present = _opened("/proc/self/statm", os.O_RDONLY)
        self._clear = _opened("/proc/self/clear_refs", os.O_WRONLY)
        self._told = 0.0

    def take(self) -> int:
        """Bytes; 0 where the kernel tells nothing."""
        if self._status < 0:
            return 0
        now = time.monotonic()
        if now - self._told < MOMENT:
            return int(os.pread(self._present, 256, 0).split()[1]) * PAGE
        self._told, status = now, os.pread(self._status, 4096, 0)
        try:
            os.pwrite(self._clear, b"5", 0)  # proc(5): resets VmHWM
        except OSError:  # among them that of -1
            return _field(status, b"VmRSS:")
        return _field(status, b"VmHWM:")


def _field(status: bytes, name: bytes) -> int:
    return int(status.split(name, 1)[1].split(maxsplit=1)[0]) * 1024


def _opened(path: str, flags: int) -> int:
    """A descriptor, or -1."""
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError:
        return -1
