"""Measure what this device can do at best: matrix products, copies on it, to the host and back, launches; seconds.

python -m bench.gpu.ceilings
"""

import time

import torch

from tests.gpu.machine import DEVICE, REHEARSED, note, seconds, synchronize

LAUNCHES = 2000


def best(work, repeats: int = 5) -> float:
    """Return the least seconds that `work` takes, after one run to warm up."""
    work()
    return min(seconds(work) for _ in range(repeats))


def main() -> None:
    size, num_bytes = (256, 2**20) if REHEARSED else (8192, 2**31)
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source, target = (torch.zeros(num_bytes, device=DEVICE, dtype=torch.uint8) for _ in range(2))
    source.view(torch.int64).random_()
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not REHEARSED)
    rates = {
        "bf16_tflops": 2 * size**3 / best(lambda: a @ b) / 1e12,
        "copy_tb_per_s": 2 * num_bytes / best(lambda: target.copy_(source)) / 1e12,
        "to_host_gb_per_s": num_bytes / best(lambda: host.copy_(source, non_blocking=True)) / 1e9,
        "to_device_gb_per_s": num_bytes / best(lambda: target.copy_(host, non_blocking=True)) / 1e9,
    }
    small = torch.zeros(8, device=DEVICE)
    synchronize()
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        small.add_(1)
    rates["launch_us"] = (time.perf_counter() - began) / LAUNCHES * 1e6  # of the CPU: the device may be behind
    rates["item_us"] = best(lambda: small[0].item(), 20) * 1e6
    name = "cpu" if REHEARSED else torch.get_device_module(DEVICE).get_device_name()
    note("ceilings", device=name, **rates)


if __name__ == "__main__":
    main()
