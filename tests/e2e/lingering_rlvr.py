"""The door, made to linger at one point of step 2, so that a test can strike there. Else the same program.

    LINGER="collective prepare: samples" torchrun ... tests/e2e/lingering_rlvr.py key=value ...

A point is a journal event and the phase or collective it belongs to. Beside the journal's own events there is
`progress <phase>`: an engine step, a weight handed over, a tensor written.
"""

import os
import time

from spmd_rl.config import RlvrConfig, main
from spmd_rl.distributed import Journal, World
from spmd_rl.rlvr import run

SECONDS = 0.7
EVENT, _, WHAT = os.environ["LINGER"].partition(" ")
STEP = 2

note, progress = Journal.note, World.progress
lingered = False


def lingering_note(journal: Journal, event: str, **fields) -> None:
    """Write the line, then linger if this is the point: who reads the line finds the rank there."""
    global lingered
    note(journal, event, **fields)
    here = event == EVENT and WHAT in (fields.get("phase"), fields.get("name"))
    if here and journal.step == STEP and not lingered:
        lingered = True
        time.sleep(SECONDS)


def noted_progress(world: World, n: int = 1) -> None:
    """Progress, written down where it is the point."""
    progress(world, n)
    if EVENT == "progress":
        world.journal.note("progress", phase=world.journal.phase_name)


if __name__ == "__main__":
    Journal.note, World.progress = lingering_note, noted_progress
    main("rlvr", RlvrConfig, run)
