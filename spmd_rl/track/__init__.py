"""The files of a run directory that people read, and trackers.

`metrics.jsonl` has one object a step, `samples/step-000001.jsonl` every sample of a step. `report.html` is the page in
`page/` with the data of a run inside; `python -m spmd_rl report RUN_DIR` writes it again, `view` serves the same page,
and `compare` fills it with several runs.
"""
