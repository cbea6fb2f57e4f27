"""Checks which parts of spmd_rl work on this machine, or on these ranks, and prints a cure for those that do not.

    python -m spmd_rl doctor
    torchrun --nproc-per-node 8 -m spmd_rl doctor run.dir=/shared/runs/mine sidecar.bind=tcp://127.0.0.1:5555

Any setting of a run is allowed: its directory, ports and limits are then checked. The model is a tiny random one, made
on the fly. Nothing is downloaded, and nothing stays behind.

    checks                   the list of all checks, and the ways in which a check fails
    machine, services        checks once per node: versions, limits, disk, ports; sandbox and sidecar. Torch-free
    devices, roles, engines  checks of all ranks: devices; together collectives, training, engines, checkpoints
    bench                    the world, the tiny model and the roles that these checks share
    runner                   checks in child processes, so that a crash or hang does not end the others
    ranks                    waits between the ranks with a time limit, and the search for missing ones
"""
