"""`train.deterministic`: forward and backward passes with a fixed summation order, also on a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def fix_workspace() -> None:
    """Make cuBLAS use fixed-size workspaces; call before the first matrix product of the process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch use deterministic algorithms inside, and raise for operations without one."""
    # Not for the whole process: the engine samples with `cumsum`, which has no deterministic GPU algorithm in torch.
    chosen, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling uninitialised memory costs time, and no code here reads it before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.set_deterministic_debug_mode(chosen)
