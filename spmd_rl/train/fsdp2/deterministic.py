"""`train.deterministic`: forward and backward passes whose sums have one order, also on a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def fix_workspace() -> None:
    """Have cuBLAS compute with workspaces of one size; to be called before the first matrix product of the process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic() -> Iterator[None]:
    """Have torch take deterministic algorithms inside, and raise where there is none.

    It is not set for the whole process: the engine samples with running sums, for which torch has none on a GPU.
    """
    chosen, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads what nothing has written
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.set_deterministic_debug_mode(chosen)
