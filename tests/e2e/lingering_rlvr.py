"""The door, made to linger at one point of one step, so that a test can strike there. Else the same program.

    LINGER="collective prepare: samples" torchrun ... tests/e2e/lingering_rlvr.py key=value ...

A point is a journal event and the phase or collective it belongs to. Beside the journal's own events there is
`progress <phase>`: an engine step, a weight handed over, a tensor written.
"""

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.config import main
from spmd_rl.config.pipelines import PIPELINES
from spmd_rl.distributed import Journal, World

SECONDS = float(os.environ.get("LINGER_SECONDS", "0.7"))
EVENT, _, WHAT = os.environ["LINGER"].partition(" ")
STEP = int(os.environ.get("LINGER_STEP", "2"))

note, phase, progress = Journal.note, Journal.phase, World.progress
lingered = False


def linger(journal: Journal, event: str, *names: str | None) -> None:
    """Linger if this is the point, whose line is written: who reads it finds the rank there."""
    global lingered
    if event == EVENT and WHAT in names and journal.step == STEP and not lingered:
        lingered = True
        time.sleep(SECONDS)


def lingering_note(journal: Journal, event: str, **fields) -> None:
    """Write the line, then linger if this is the point."""
    note(journal, event, **fields)
    linger(journal, event, fields.get("phase"), fields.get("name"))


@contextmanager
def lingering_phase(journal: Journal, name: str) -> Iterator[None]:
    """Enter the phase, then linger if this is the point."""
    with phase(journal, name):
        linger(journal, "enter", name)
        yield


def noted_progress(world: World, n: int = 1) -> None:
    """Progress, written down where it is the point."""
    progress(world, n)
    if EVENT == "progress":
        world.journal.note("progress", phase=world.journal.phase_name)


if __name__ == "__main__":
    Journal.note, Journal.phase, World.progress = lingering_note, lingering_phase, noted_progress
    PIPELINE = os.environ.get("LINGER_PIPELINE", "rlvr")
    main(PIPELINE, PIPELINES[PIPELINE], importlib.import_module(f"spmd_rl.{PIPELINE}").run)
