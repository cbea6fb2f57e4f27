"""`train.deterministic`: passes with a fixed summation order, also on a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def fix_workspace() -> None:
    """Fix the size of cuBLAS workspaces; call before the process's first matrix product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic() -> Iterator[None]:
    """Use torch's deterministic algorithms inside; operations without one raise."""
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
