"""`profile=true`: a torch profiler trace of one step, one file a rank, for Perfetto or chrome://tracing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def trace(path: Path) -> Iterator[None]:
    """Trace what is inside: the CPU, and the accelerator where there is one. Nothing is written after an exception."""
    with torch.profiler.profile() as profiler:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
