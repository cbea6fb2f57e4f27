"""The files of a run directory that people read, and trackers.

`metrics.jsonl` has one object a step, reduced over ranks. `samples/step-000001.jsonl` has every sample of a step.
`report.html` is one page; `python -m spmd_rl.track.report RUN_DIR` writes it again.
`python -m spmd_rl.track.curve RUN_DIR... --out curve.svg` draws learning curves for a README.
"""

from spmd_rl.track.run import Run

__all__ = ["Run"]
