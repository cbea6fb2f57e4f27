"""The files of a run directory that people read, and trackers.

`metrics.jsonl` has one object a step, reduced over ranks. `samples/step-000001.jsonl` has every sample of a step.
`report.html` is one page; `python -m spmd_rl report RUN_DIR` writes it again.
`python -m spmd_rl compare RUN_DIR... --out curves.svg` draws learning curves for a README.
"""

import importlib
from typing import Any

__all__ = ["Run"]


def __getattr__(name: str) -> Any:
    """Import `Run`, and torch with it, where it is asked for: those who only read a run directory do without."""
    if name != "Run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("spmd_rl.track.run").Run
