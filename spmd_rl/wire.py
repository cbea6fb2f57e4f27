"""The messages of the sidecar under a second name; see `sidecar/wire.py`."""

# ruff: noqa: F403
from spmd_rl.sidecar.wire import *
