"""Checks what of spmd_rl works on this machine, or on these ranks, and says how to mend what does not.

    python -m spmd_rl doctor
    torchrun --nproc-per-node 8 -m spmd_rl doctor run.dir=/shared/runs/mine sidecar.bind=tcp://127.0.0.1:5555

Any setting of a run may stand on the line: its directory, ports and limits are then the ones that are checked. The
model is a tiny random one, made on the fly. Nothing is downloaded, and nothing stays behind.

| module | what it is |
|---|---|
| `checks` | the list of all checks, and how a check says that it failed |
| `machine`, `services` | what each node is asked once: versions, limits, disk, ports; sandbox and sidecar. Torch-free |
| `devices`, `roles`, `engines` | what all ranks do together: devices, collectives, training, engines, checkpoints |
| `bench` | the world, the tiny model and the roles that these checks share |
| `runner`, `child` | checks run in child processes, so that one that crashes or hangs does not end the others |
| `ranks` | how the ranks wait for each other with a time limit, and find who is missing |
| `table` | the results of all ranks as one table |
"""
