"""Peak memory of each phase: the accelerator's allocator where there is one, else this process's resident set.

A phase's peak includes the phases nested in it. Left out: other processes (sidecars) and the host side of a GPU run.
"""

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PhaseMemory:
    """Told of every phase entered and left, remembers the highest use of memory in between, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._on_accelerator = device.type != "cpu"
        self._open: list[str] = []
        self._peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """A phase begins, inside those that are open."""
        self._settle()
        self._open.append(phase)

    def exit(self, phase: str) -> None:
        """The innermost phase ends."""
        assert self._open and self._open[-1] == phase, f"left {phase}, open are {self._open}"
        self._settle()
        self._open.pop()

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
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    try:
        _CLEAR.write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return int(fields["VmRSS"].split()[0]) * 1024
    return int(fields["VmHWM"].split()[0]) * 1024
