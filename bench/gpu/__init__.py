"""Benchmarks on an accelerator: `make gpu-check` (`check.py`), a card's limits, two runs compared bit by bit."""
