"""`profile=true`: a torch profiler trace of one step, one file a rank, to open in Perfetto or chrome://tracing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def trace(path: Path) -> Iterator[None]:
    """Profile the code inside on the CPU and the accelerator, and write the trace; after an exception write nothing."""
    with torch.profiler.profile() as profiler:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
