"""Peak memory of each phase, nested ones included: the accelerator's allocator, else this process's resident set.

Other processes (the sidecars) and, on an accelerator, host memory are not counted.
"""

from pathlib import Path

import torch


class PhaseMemory:
    """Watcher of a journal's phases and their peak memory in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._peak_of_late = resident_peak if device.type == "cpu" else accelerator_peak
        self._open: list[str] = []
        self._peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """Begin a phase, inside open ones."""
        self._update()
        self._open.append(phase)

    def exit(self, phase: str) -> None:
        """End the innermost phase, which must be `phase`."""
        self._update()
        innermost = self._open.pop()
        assert innermost == phase, f"phase {phase} ends inside phase {innermost}"

    def take(self) -> dict[str, int]:
        """Return the peak bytes by phase since the last call."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _update(self) -> None:
        peak = self._peak_of_late()
        for phase in self._open:
            # Every open phase, since the peak of a phase includes nested ones.
            self._peaks[phase] = max(peak, self._peaks.get(phase, 0))


def accelerator_peak() -> int:
    """Return the peak of allocated bytes since the last call."""
    peak = torch.accelerator.max_memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    return peak


def resident_peak() -> int:
    """Return this process's peak resident bytes since the last call.

    Without permission to reset the peak the present value, and 0 without `/proc`.
    """
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        return 0
    try:
        # Writing 5 resets VmHWM, see proc(5).
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _kib(status["VmRSS"])
    return _kib(status["VmHWM"])


def _kib(field: str) -> int:
    return int(field.split()[0]) * 1024
