"""The command line and the machine of a run, as text for people."""

import os
import platform
import shlex
import sys
from pathlib import Path

import torch


def command_line() -> str:
    """Return the command line of this run. Example: `torchrun --nproc-per-node 2 -m spmd_rl.rlvr steps=20`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec else [sys.argv[0]]
    return shlex.join([*_launcher(), *program, *sys.argv[1:]])


def machine() -> str:
    """Describe this machine. Example: `2 x Intel(R) Xeon(R) Processor, 24 GiB`, with accelerators in front."""
    parts = []
    if torch.accelerator.is_available():
        parts.append(f"{torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts.append(f"{cores} x {_cpu_name()}")
    parts.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB")
    return ", ".join(parts)


def _launcher() -> list[str]:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python"]
    local, total = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    nodes = ["--nnodes", str(total // local)] if total > local else []
    return ["torchrun", *nodes, "--nproc-per-node", str(local)]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
