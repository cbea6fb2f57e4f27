"""Copies from the CPU to a device that nobody waits for."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`; from the CPU it goes through pinned memory, so that the call does not block."""
    if tensor.is_cpu and device.type != "cpu" and torch.accelerator.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
