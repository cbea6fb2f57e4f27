"""Accelerators by their drivers' files, independent of torch's build. Torch-free."""

import os
import re
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
HIDING = {
    "nvidia[0-9]*": ("CUDA_VISIBLE_DEVICES",),
    "kfd": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "davinci[0-9]*": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""Accelerators' files in /dev, with the variables that hide them, the usual one first.

Not Intel's: integrated graphics have the same files.
"""
# AMD's integrated GPUs have a /dev/kfd too, with at most 80; a slice of an Instinct has 128.
INTEGRATED_SIMDS = 96
"""Most SIMD units of an integrated GPU"""


def device_file() -> tuple[str, tuple[str, ...]] | None:
    """Return a visible accelerator's file and the variables that hide it, if any."""
    for pattern, names in HIDING.items():
        files = sorted((ROOT / "dev").glob(pattern))
        if files and not any(map(_hides, names)) and (pattern != "kfd" or _has_large_gpu()):
            return f"/dev/{files[0].name}", names
    return None


def _hides(name: str) -> bool:
    """Return True if a variable selects no device, by CUDA's rules."""
    return name in os.environ and os.environ[name].split(",")[0].strip() in ("", "-1")


def _has_large_gpu() -> bool:
    """Return True if an AMD GPU is not integrated, or sizes are unknown."""
    sizes = []
    for path in (ROOT / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        # Devices that were not assigned to this container or job are unreadable.
        with suppress(OSError):
            sizes += re.findall(r"^simd_count (\d+)$", path.read_text(), re.MULTILINE)
    return not sizes or max(map(int, sizes)) > INTEGRATED_SIMDS


def driver() -> str:
    """Return NVIDIA's driver version in brackets, or an empty string."""
    path = ROOT / "proc/driver/nvidia/version"
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", path.read_text() if path.is_file() else "")
    return f" (driver {found[0]})" if found else ""
