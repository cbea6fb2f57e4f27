"""Shows what a run wrote into its sample log: steps, samples and trajectories turn by turn, while it runs or after.

    python -m spmd_rl view RUN           # a page on this machine: one process, no network, no other files
    python -m spmd_rl view RUN --text    # the same on a terminal

RUN is a run directory, or a folder of them. Nothing of torch, and nothing is written.
"""
