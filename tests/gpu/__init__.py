"""What only an accelerator can show, in order of value: `make test-gpu`, a few minutes on one H200; skipped elsewhere.

Figures go to `runs/gpu.jsonl` (or `$OUT/gpu.jsonl`), one line each. Not provable on one card: NCCL beyond a rank,
tp > 1, overlap of FSDP's gathers, everything about many ranks.
"""
