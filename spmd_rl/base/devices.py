"""Copies from the CPU to a device that nobody waits for, and which kind of device a tensor's computations are for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_stand_in: list[str] = []
"""What the CPU stands for; the last one counts."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`; from the CPU it goes through pinned memory, so that the call does not block."""
    if tensor.is_cpu and device.type != "cpu" and torch.accelerator.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def kind(device: torch.device) -> str:
    """Return the type of a device, by which kernels and the sizes of buffers are chosen: `cpu`, `cuda`, ..."""
    return _stand_in[-1] if _stand_in and device.type == "cpu" else device.type


@contextmanager
def cpu_as(device: str) -> Iterator[None]:
    """Within, `kind` of the CPU is `device`: for tensors without content, of which nothing is computed."""
    _stand_in.append(device)
    try:
        yield
    finally:
        _stand_in.pop()
