"""Progress lines on stderr for commands that only print, after two seconds.

with phase("reading the prompts"):  # "reading the prompts ..."
    prompts = Prompts.load(cfg.data)
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_rl.base.errors import tell
from spmd_rl.config.ranks import rank

QUIET_SECONDS, LEAST_SECONDS = 2.0, 0.2
"""Age in seconds of the command, and of the phase, before its line."""
BEGAN = time.monotonic()


@contextmanager
def phase(text: str, speaks: bool | None = None) -> Iterator[None]:
    """Print the text as soon as the command is two seconds old, if this phase is still active then.

    speaks: True if this process prints; by default rank 0 does.
    """
    wait = max(LEAST_SECONDS, BEGAN + QUIET_SECONDS - time.monotonic())
    timer = threading.Timer(wait, tell, (f"{text} ...",))
    timer.daemon = True
    if rank() == 0 if speaks is None else speaks:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
