"""Measured memory of a run, from the metrics in its directory, to compare with its plan."""

from pathlib import Path

from spmd_rl.track.metrics import read_lines
from spmd_rl.track.render import NAMES


def measured_peaks(run_dir: Path) -> dict[str, int]:
    """Return the peak of memory of any rank and step by phase, in bytes; empty without any step.

    On a device it is the allocator's peak; on the CPU the whole process' resident set.
    """
    peaks: dict[str, int] = {}
    phases = {name: phase for phase, name in NAMES.items()}
    for line in read_lines(run_dir / "metrics.jsonl"):
        for key, value in line.items():
            kind, _, name = key.partition("/")
            phase, _, last = name.rpartition("/")
            phase = phases.get(phase, phase)
            if (kind, last) == ("memory", "peak_bytes") and value:
                peaks[phase] = max(int(value), peaks.get(phase, 0))
    return peaks
