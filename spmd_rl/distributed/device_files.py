"""Whether this machine has an accelerator, whatever torch makes of it: by the files that drivers make. Torch-free."""

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
"""Files of accelerators in /dev -> variables with which a user hides them, the usual one first.

Intel's are left out: a processor's own graphics have the same."""
INTEGRATED_SIMDS = 96
"""AMD processors' own graphics, which have a /dev/kfd too, have at most 80 of them; a slice of an Instinct has 128."""


def device_file() -> tuple[str, tuple[str, ...]] | None:
    """Return the file of an accelerator, and the variables that hide it; None if there is none that is not hidden."""
    for pattern, names in HIDING.items():
        files = sorted((ROOT / "dev").glob(pattern))
        if files and not any(map(_hides, names)) and (pattern != "kfd" or _has_large_gpu()):
            return f"/dev/{files[0].name}", names
    return None


def _hides(name: str) -> bool:
    """Return whether a variable asks for no device at all, as CUDA reads it."""
    return name in os.environ and os.environ[name].split(",")[0].strip() in ("", "-1")


def _has_large_gpu() -> bool:
    """Return whether one of AMD's GPUs is no processor's own, or nothing says what they are."""
    sizes = []
    for path in (ROOT / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        with suppress(OSError):  # a device that this container or job was not given
            sizes += re.findall(r"^simd_count (\d+)$", path.read_text(), re.MULTILINE)
    return not sizes or max(map(int, sizes)) > INTEGRATED_SIMDS


def driver() -> str:
    """Return the version of NVIDIA's kernel driver, in brackets, or nothing where it does not say."""
    path = ROOT / "proc/driver/nvidia/version"
    found = re.search(r"\d{3,}\.\d+(\.\d+)?", path.read_text() if path.is_file() else "")
    return f" (driver {found[0]})" if found else ""
