"""The files of a run directory that people read, and trackers.

`metrics.jsonl` has one object a step, reduced over ranks. `samples/step-000001.jsonl` has every sample of a step.
`report.html` is one page; `python -m spmd_rl report RUN_DIR` writes it again. `python -m spmd_rl compare RUN_DIR...
--out curves.svg` draws learning curves for a README.
"""
