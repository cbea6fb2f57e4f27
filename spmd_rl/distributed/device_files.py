"""Detection of accelerators by their drivers' files, independent of torch's build. Torch-free."""

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
"""Files of accelerators in /dev, with the variables by which a user hides them, the usual one first.

Intel's are left out: integrated graphics have the same files.
"""
INTEGRATED_SIMDS = 96
"""Upper bound of SIMD units of an integrated GPU. AMD's have a /dev/kfd too, with at most 80; a slice of an Instinct
has 128.
"""


def device_file() -> tuple[str, tuple[str, ...]] | None:
    """Return the file of an accelerator and the variables that hide it; None if there is no visible one."""
    for pattern, names in HIDING.items():
        files = sorted((ROOT / "dev").glob(pattern))
        if files and not any(map(_hides, names)) and (pattern != "kfd" or _has_large_gpu()):
            return f"/dev/{files[0].name}", names
    return None


def _hides(name: str) -> bool:
    """Return True if a variable selects no device at all, by CUDA's rules."""
    return name in os.environ and os.environ[name].split(",")[0].strip() in ("", "-1")


def _has_large_gpu() -> bool:
    """Return True if one of AMD's GPUs is not integrated, or if their sizes are unknown."""
    sizes = []
    for path in (ROOT / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        # Devices that were not assigned to this container or job are unreadable.
        with suppress(OSError):  # a device that this container or job was not given
            sizes += re.findall(r"^simd_count (\d+)$", path.read_text(), re.MULTILINE)
    return not sizes or max(map(int, sizes)) > INTEGRATED_SIMDS


def driver() -> str:
    """Return the version of NVIDIA's kernel driver, in brackets, or an empty string if unknown."""
    path = ROOT / "proc/driver/nvidia/version"
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", path.read_text() if path.is_file() else "")
    return f" (driver {found[0]})" if found else ""
