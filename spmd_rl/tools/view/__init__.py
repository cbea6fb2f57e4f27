"""Shows a run, during it or later: curves, times, and samples turn by turn.

    python -m spmd_rl view RUN           # a page on this machine: one process, no network, no other files
    python -m spmd_rl view RUN --text    # the same on a terminal

RUN is a run directory, or a folder of them. Nothing is written.
"""
