"""Shows a run's sample log: steps, samples and trajectories turn by turn, during the run or later.

    python -m spmd_rl view RUN           # a page on this machine: one process, no network, no other files
    python -m spmd_rl view RUN --text    # the same on a terminal

RUN is a run directory, or a folder of them. Torch-free, and nothing is written.
"""
