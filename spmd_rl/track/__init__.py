"""What a run leaves behind for people: metrics, samples, trackers and the report, in the run directory.

metrics.jsonl              one object a step, reduced over ranks
samples/step-000001.jsonl  every sample of a step
report.html                one page: `python -m spmd_rl.track.report RUN_DIR` draws it again
(docs) curve.svg           `python -m spmd_rl.track.curve RUN_DIR... --out curve.svg`
"""

from spmd_rl.track.run import Run

__all__ = ["Run"]
