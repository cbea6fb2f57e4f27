"""Checks which parts of spmd_rl work on this machine, or on these ranks, and prints a cure for those that do not.

    python -m spmd_rl doctor
    torchrun --nproc-per-node 8 -m spmd_rl doctor run.dir=/shared/runs/mine sidecar.bind=tcp://127.0.0.1:5555

Any setting of a run is allowed: its directory, ports and limits are then checked. The model is a tiny random one.
Nothing is downloaded, and nothing stays behind.

Checks of `machine` and `services` run once per node, torch-free; those of `devices`, `roles` and `engines` on all
ranks. Each has a child process (`runner`), so that a crash or hang ends it alone.
"""
