"""Checks once per node: versions, limits, the run directory, ports. Torch-free."""

import errno
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from spmd_rl.config.model_files import num_weights
from spmd_rl.config.packages import installed, requirements
from spmd_rl.config.ranks import local_rank
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed.device_files import device_file
from spmd_rl.tools.doctor.checks import Failed, Skipped, gib

SHOWN = ("torch", "transformers", "vllm", "deepspeed", "megatron-core", "hydra-core", "msgspec", "pyzmq")
SHOWN += ("safetensors", "numpy")
OPEN_FILES, OPEN_FILES_PER_RANK = 512, 256
SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm through which NCCL moves data between the ranks of a node."""
WRITTEN = 16 << 20
"""Bytes that are written to measure a disk."""
BYTES_PER_WEIGHT = 12
"""Bytes per weight in a checkpoint: float32 weights and AdamW's two moments, without `hf/`."""
MASTER_PORT = 29500
"""Default port of torchrun's store."""


def versions(cfg: RlvrConfig) -> str:
    """Compare installed versions with `pyproject.toml`, including installed extras."""
    wrong, shown = [], [f"python {'.'.join(map(str, sys.version_info[:3]))}"]
    for requirement in requirements():
        version = installed(requirement.name)
        optional = requirement.marker is not None
        if version is None:
            wrong += [] if optional else [(requirement, "is not installed")]
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append((requirement, f"is {version}"))
        if requirement.name in SHOWN and version:
            shown.append(f"{requirement.name} {version}")
    if wrong:
        told = "; ".join(f"{r.name} {found}, needed: {r.name}{r.specifier}" for r, found in wrong)
        raise Failed(told, f"pip install {' '.join(repr(f'{r.name}{r.specifier}') for r, _ in wrong)}")
    return ", ".join(dict.fromkeys(shown))


def open_files(cfg: RlvrConfig) -> str:
    """Compare `ulimit -n` with the needs of this node's ranks: sockets, pipes and files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * ranks
    if soft != resource.RLIM_INFINITY and soft < needed:
        hint = "ulimit -n 65536 before the start" if hard == -1 or hard >= needed else "ask for a higher hard limit"
        cure = f"{hint} (docker: --ulimit nofile=65536; Slurm, systemd: LimitNOFILE=65536)"
        raise Failed(f"ulimit -n is {soft}; {ranks} ranks on this node need {needed}", cure)
    return f"ulimit -n {'unlimited' if soft == -1 else soft}"


def shared_memory(cfg: RlvrConfig) -> str:
    """Measure /dev/shm, which NCCL needs between the devices of a node."""
    if not os.path.isdir("/dev/shm"):
        raise Skipped("there is no /dev/shm")
    total, _, free = shutil.disk_usage("/dev/shm")
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    if several and device_file() and free < SHARED_MEMORY:
        cure = "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm"
        raise Failed(f"/dev/shm has {gib(free)} free of {gib(total)}; NCCL needs {gib(SHARED_MEMORY)}", cure)
    return f"/dev/shm: {gib(free)} free of {gib(total)}"


def run_directory(cfg: RlvrConfig) -> str:
    """Write, flush and read back a file next to the run directory, and compare the free space."""
    folder = Path(cfg.run.dir)
    with scratch(folder) as place:
        began = time.perf_counter()
        content = os.urandom(1 << 20) * (WRITTEN >> 20)
        with open(place / "probe", "wb") as file:
            file.write(content)
            file.flush()
            # Without it the page cache would be measured.
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        if (place / "probe").read_bytes() != content:
            raise Failed(f"run.dir={folder}: what is read back is not what was written", "check this file system")
        free = shutil.disk_usage(place).free
    keep = cfg.checkpoint.keep
    needed = BYTES_PER_WEIGHT * num_weights(Path(cfg.policy.model).expanduser()) * (keep + 1)
    if free < max(needed, WRITTEN):
        told = f"run.dir={folder}: {gib(free)} are free; checkpoints of this model (checkpoint.keep={keep}) "
        cure = "free some space, run.dir=PATH on a larger disk, or a smaller checkpoint.keep"
        raise Failed(f"{told}need {gib(max(needed, WRITTEN))}", cure)
    checkpoints = f", checkpoints need {gib(needed)}" if needed else ""
    return f"{folder}: {gib(free)} free{checkpoints}, writes {WRITTEN / seconds / 2**20:.0f} MiB/s"


@contextmanager
def scratch(run_dir: Path) -> Iterator[Path]:
    """Make a directory in the nearest existing parent of a run directory, or in itself, and remove it on exit.

    Raises `Failed` if that is not possible, and if the disk fills up inside.
    """
    place = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    elsewhere = "run.dir=PATH of a directory that this user may write and all nodes share"
    try:
        with TemporaryDirectory(prefix=".spmd_rl_doctor-", dir=place) as made:
            yield Path(made)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cure = "free some space (or raise the quota), or run.dir=PATH on another disk"
            raise Failed(f"run.dir={run_dir}: no space is left in {place} ({error.strerror})", cure) from None
        raise Failed(f"run.dir={run_dir}: {place} cannot be written: {error.strerror}", elsewhere) from None


def ports(cfg: RlvrConfig) -> str:
    """Bind the port of torchrun's store, unless it is running already, and the sidecar's, if it has one."""
    found = []
    if "LOCAL_RANK" not in os.environ:
        port = int(os.environ.get("MASTER_PORT", MASTER_PORT))
        _bind("", port, "MASTER_PORT", "torchrun --standalone (finds a free one), or torchrun --master-port NUMBER")
        found.append(f"MASTER_PORT {port} is free")
    elif local_rank() == 0:
        found.append(f"MASTER_PORT {os.environ['MASTER_PORT']} is in use by this job")
    if cfg.sidecar.bind.startswith("tcp://"):
        host, _, port = cfg.sidecar.bind.removeprefix("tcp://").rpartition(":")
        _bind(host.strip("[]*"), int(port), "sidecar.bind", "sidecar.bind=ipc, or another port in sidecar.bind")
        found.append(f"sidecar {cfg.sidecar.bind} is free")
    return ", ".join([*found, "sidecar: a private socket"] if cfg.sidecar.bind == "ipc" else found)


def _bind(host: str, port: int, key: str, cure: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        # A port in TIME_WAIT after an earlier job can be used.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            raise Failed(
                f"{key}: port {port} cannot be used: {error.strerror}", f"{cure}; `ss -ltnp` shows who has it"
            ) from None
