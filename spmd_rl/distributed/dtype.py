"""`policy.dtype=auto`: bfloat16 if the hardware of all ranks supports it natively, else float32.

A CPU without such instructions multiplies bfloat16 matrices at about a quarter of float32's speed.
"""

import os
import platform
from pathlib import Path

import torch

from spmd_rl.base.errors import tell
from spmd_rl.config.sections.models import ServedModelConfig
from spmd_rl.distributed.world import World

CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags in /proc/cpuinfo of instructions that multiply bfloat16; the last is that of ARM."""


def agree_on_dtype(world: World, policy: ServedModelConfig) -> None:
    """[all] Replace `policy.dtype=auto` by bfloat16 or float32, alike on all ranks; rank 0 prints the reason.

    The settings must be agreed already: all ranks have `auto`, or none does.
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
    """Return the faster of `bfloat16` and `float32` on a device, and the reason in a few words."""
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
    """Return the flags of the first processor in the text of /proc/cpuinfo, on x86 and on ARM."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next(
        (frozenset(value.split()) for name, _, value in lines if name.strip() in ("flags", "Features")), frozenset()
    )


def choose_cpu_dtype(flags: frozenset[str], max_isa: str = "") -> tuple[str, str]:
    """Return the dtype and the reason for a CPU with these flags.

    max_isa: `ONEDNN_MAX_CPU_ISA`, oneDNN's own limit on the instructions that it uses.
    """
    found = next((flag for flag in CPU_FLAGS if flag in flags), None)
    if found is None:
        return "float32", f"this CPU ({platform.machine()}) has no instructions for bfloat16 ({', '.join(CPU_FLAGS)})"
    if max_isa.upper() not in ("", "ALL", "DEFAULT") and not any(
        word in max_isa.upper() for word in ("16", "AMX", "AVX10")
    ):
        return "float32", f"ONEDNN_MAX_CPU_ISA={max_isa} excludes the CPU's instructions for bfloat16"
    return "bfloat16", f"this CPU supports it ({found})"
