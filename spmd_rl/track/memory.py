"""Peak memory of each phase: the accelerator's allocator where there is one, else this process's resident set.

A phase's peak includes the phases nested in it. Left out: other processes (sidecars) and the host side of a GPU run.
"""

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_BRIEF = "coordination"
"""Too short and too frequent to be measured by itself: it counts as part of the phase around it."""


class PhaseMemory:
    """Told of every phase entered and left, remembers the highest use of memory in between, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._on_accelerator = device.type != "cpu"
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
        peak = self._accelerator_peak() if self._on_accelerator else _resident_peak()
        for phase in self._open:
            self._peaks[phase] = max(peak, self._peaks.get(phase, 0))

    def _accelerator_peak(self) -> int:
        peak = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        return peak


def _resident_peak() -> int:
    """Highest resident set since the last call, in bytes; the present one where the kernel cannot reset its mark."""
    if not _STATUS.exists():
        return 0
    status = _STATUS.read_bytes()
    field = b"VmHWM:"
    try:
        _CLEAR.write_bytes(b"5")  # proc(5): resets VmHWM
    except OSError:
        field = b"VmRSS:"
    return int(status.split(field, 1)[1].split(maxsplit=1)[0]) * 1024
