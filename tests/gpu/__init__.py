"""Tests that need an accelerator, in order of value: `make test-gpu`, a few minutes on one GPU; skipped elsewhere.

`GPU_TESTS=rehearse` runs their bodies on the CPU with small shapes (`test_rehearsal.py`), so that a changed signature
or a missing import is found without a device. Figures go to `runs/gpu.jsonl` (or `$OUT/gpu.jsonl`), a line each. One
card cannot prove NCCL beyond a rank, tp > 1, the overlap of FSDP's gathers, nor anything about many ranks.
"""
