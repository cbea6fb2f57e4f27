"""Checks of devices, the speed of bfloat16, the shared directory and collectives, by all ranks."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spmd_rl.config.ranks import local_rank, world_size
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import shared_group
from spmd_rl.distributed.dtype import choose_dtype
from spmd_rl.distributed.membership import unusable_device
from spmd_rl.tools.doctor.checks import Failed, Skipped, gib

if TYPE_CHECKING:
    from spmd_rl.tools.doctor.bench import Bench

BUSY = 0.5
"""Share of free memory below which another process uses the device."""
SMALL, LARGE = 8, {"cpu": 4 << 20, "device": 64 << 20}
"""Bytes of the all-reduces that measure latency and bandwidth."""


def devices(cfg: RlvrConfig) -> str:
    """Find this rank's device and its free memory."""
    if not torch.accelerator.is_available():
        if fault := unusable_device():
            raise Failed(*fault)
        return f"no accelerator; {torch.get_num_threads()} CPU threads a rank (OMP_NUM_THREADS)"
    kind, count = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
    if local_rank() >= count:
        cure = f"--nproc-per-node {count}, or more devices in CUDA_VISIBLE_DEVICES"
        raise Failed(f"local rank {local_rank()} has no device: this node shows {count}", cure)
    torch.accelerator.set_device_index(local_rank())
    module = torch.get_device_module(kind)
    free, total = module.mem_get_info(local_rank())
    if free < BUSY * total:
        cure = "end that process (nvidia-smi shows it), or leave the device out: CUDA_VISIBLE_DEVICES"
        raise Failed(f"{kind}:{local_rank()}: {gib(free)} of {gib(total)} are free; another process has the rest", cure)
    name = module.get_device_name(local_rank())
    return f"{count} x {name}, {gib(free)} of {gib(total)} free on {kind}:{local_rank()}"


def dtype(cfg: RlvrConfig) -> str:
    """Measure matrix products in bfloat16 against float32."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if local_rank():
        return "measured on the first rank of each node"
    size = 512 if device.type == "cpu" else 8192
    seconds = {}
    for kind in (torch.float32, torch.bfloat16):
        matrix = torch.randn(size, size, device=device).to(kind)
        seconds[kind] = _best(lambda m=matrix: m @ m, device, 5)
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    hardware = f"; {choose_dtype(device)[1]}" if device.type == "cpu" else ""
    choice = "bfloat16" if ratio > 1 else "float32"
    rate = 2 * size**3 / seconds[torch.bfloat16] / 1e12
    return f"bfloat16 at {ratio:.1f} x float32's speed, {rate:.2g} TFLOP/s{hardware}: set policy.dtype={choice}"


def _best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device.type != "cpu":
            # Kernels run asynchronously: without it only their launch would be timed.
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - began)
    # The minimum: other processes can only make a measurement slower.
    return min(found[1:])


def process_group(bench: "Bench") -> str:
    """[all] Form the process groups of all ranks."""
    world = bench.world  # [all]
    backends = dist.get_backend_config() if dist.is_initialized() else "none"
    return f"{world.size} rank{'s' * (world.size > 1)}, {backends}"


def shared_directory(bench: "Bench") -> str:
    """[all] Check that all ranks see a file that rank 0 writes next to the run directory."""
    path = bench.shared / "seen"
    if bench.world.rank == 0:
        path.write_text("seen")
    bench.world.barrier("doctor: written")  # [all]
    seen = bench.world.gather("doctor: seen", path.exists())  # [all]
    if blind := [rank for rank, sees in enumerate(seen) if not sees]:
        cure = "run.dir=PATH on a disk that all nodes mount (NFS, Lustre), under the same path everywhere"
        raise Failed(f"ranks {blind} do not see what rank 0 writes in {path.parent.parent}", cure)
    return f"{path.parent.parent}: all {len(seen)} ranks see it"


def host_collectives(bench: "Bench") -> str:
    """[all] Measure gloo's all-reduce and, on one node, that in shared memory."""
    world = bench.world  # [all]
    if world.size == 1:
        raise Skipped("one rank; start it with torchrun")
    group = world.process_group("doctor", "gloo")  # [all]
    measured = [f"gloo {_all_reduce(bench, torch.device('cpu'), group)}"]
    if world.local_size == world.size:
        group = world.process_group("doctor shm", shared_group.NAME)  # [all]
        measured.append(f"shared memory {_all_reduce(bench, torch.device('cpu'), group)}")
    return "; ".join(measured)


def library_collectives(bench: "Bench") -> str:
    """[all] Measure the all-reduce of the devices' own library, such as NCCL, over all ranks and nodes."""
    device = bench.world.device
    if world_size() == 1:
        raise Skipped("one rank; start it with torchrun")
    if device.type == "cpu":
        raise Skipped("there are no devices")
    name = dist.get_default_backend_for_device(device)
    return f"{name} over {bench.world.size} ranks {_all_reduce(bench, device, None)}"


def _all_reduce(bench: "Bench", device: torch.device, group: dist.ProcessGroup | None) -> str:
    """[all] Return latency and bandwidth of an all-reduce. Raises `Failed` for a wrong sum."""
    seconds = {}
    size = LARGE["cpu" if device.type == "cpu" else "device"]
    for num_bytes in (SMALL, size):
        tensor = torch.ones(num_bytes // 4, device=device)
        dist.all_reduce(tensor, group=group)  # [all]
        # Bandwidth alone would look fine with a transport that corrupts data.
        if not torch.all(tensor == bench.world.size):
            raise Failed(
                f"the sum of {bench.world.size} ranks' ones is {tensor[0].item():g}",
                "test the network (NCCL_DEBUG=INFO)",
            )
        tensor.zero_()
        seconds[num_bytes] = _best(lambda t=tensor: dist.all_reduce(t, group=group), device, 5)  # [all]
    return f"{1e6 * seconds[SMALL]:.0f} us, {size / seconds[size] / 1e9:.2g} GB/s"
