"""Copies to devices that do not block the CPU, and the device type that computations are planned for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_stand_in: list[str] = []
"""Device types that the CPU imitates; the last one counts."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`; from the CPU through pinned memory, so that the call does not block."""
    if tensor.is_cpu and device.type != "cpu" and torch.accelerator.is_available():
        # A copy from pageable memory synchronises with the device even with `non_blocking=True`.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def kind(device: torch.device) -> str:
    """Return a device's type, by which kernels and sizes of buffers are chosen: `cpu`, `cuda`, ..."""
    return _stand_in[-1] if _stand_in and device.type == "cpu" else device.type


@contextmanager
def cpu_as(device: str) -> Iterator[None]:
    """Let `kind` of the CPU be `device` inside: for tensors that are never computed."""
    _stand_in.append(device)
    try:
        yield
    finally:
        _stand_in.pop()
