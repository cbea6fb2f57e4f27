"""`policy.dtype=auto`: bfloat16 if all ranks' hardware supports it, else float32.

A CPU without such instructions multiplies bfloat16 at about a quarter of float32's speed.
"""

import os
import platform
from pathlib import Path

import torch

from spmd_rl.base.errors import tell
from spmd_rl.config.sections.models import ServedModelConfig
from spmd_rl.distributed.world import World

CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags in /proc/cpuinfo of bfloat16 products; the last is ARM's"""


def agree_on_dtype(world: World, policy: ServedModelConfig) -> None:
    """[all] Replace `policy.dtype=auto`, alike on all ranks; rank 0 prints the reason.

    Settings must be agreed already: all ranks have `auto`, or none.
    """
    if policy.dtype != "auto":
        return
    everyone = world.gather("start: dtype", choose_dtype(world.device))  # [all]
    slow = [rank for rank, (dtype, _) in enumerate(everyone) if dtype == "float32"]
    policy.dtype, reason = everyone[slow[0]] if slow else everyone[0]
    if slow and len(slow) < world.size:
        reason = f"on ranks {slow} {reason}, and all ranks compute in one dtype"
    if world.rank == 0:
        tell(f"policy.dtype=auto: {policy.dtype}, because {reason}")


def choose_dtype(device: torch.device) -> tuple[str, str]:
    """Return a device's faster dtype of `bfloat16` and `float32`, and a short reason."""
    if device.type == "cpu":
        path = Path("/proc/cpuinfo")
        flags = cpu_flags(path.read_text()) if path.exists() else frozenset()
        return choose_cpu_dtype(flags, os.environ.get("ONEDNN_MAX_CPU_ISA", ""))
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    # torch counts emulated bfloat16 as supported, but emulation brings no speed.
    if supported is not None and supported(including_emulation=False):
        return "bfloat16", f"this {device.type} device supports it"
    return "float32", f"this {device.type} device does not support bfloat16"


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Return the first processor's flags in the text of /proc/cpuinfo, on x86 and ARM."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next(
        (frozenset(value.split()) for name, _, value in lines if name.strip() in ("flags", "Features")), frozenset()
    )


def choose_cpu_dtype(flags: frozenset[str], max_isa: str = "") -> tuple[str, str]:
    """Return dtype and reason for a CPU with these flags.

    max_isa: `ONEDNN_MAX_CPU_ISA`, oneDNN's limit on instructions.
    """
    found = next((flag for flag in CPU_FLAGS if flag in flags), None)
    if found is None:
        return "float32", f"this CPU ({platform.machine()}) has no instructions for bfloat16 ({', '.join(CPU_FLAGS)})"
    if max_isa.upper() not in ("", "ALL", "DEFAULT") and not any(
        word in max_isa.upper() for word in ("16", "AMX", "AVX10")
    ):
        return "float32", f"ONEDNN_MAX_CPU_ISA={max_isa} excludes the CPU's instructions for bfloat16"
    return "bfloat16", f"this CPU supports it ({found})"
