"""What a run leaves behind for people, in its run directory.

`metrics.jsonl`: one object a step, reduced over ranks. `samples/step-000001.jsonl`: every sample of a step.
`report.html`: one page, drawn again by `python -m spmd_rl.track.report RUN_DIR`. Trackers, if asked for.
`python -m spmd_rl.track.curve RUN_DIR... --out curve.svg` draws learning curves for a README.
"""

from spmd_rl.track.run import Run

__all__ = ["Run"]
