"""`PhaseReporter`: a line on rank 0 during a long phase, such as `starting the engine (35 s)`.

A thread watches the main thread's phase; it counts as no progress. It prints nothing while a `WaitMessage` is open.
"""

import threading
import time
from collections.abc import Callable

from spmd_rl.base.errors import tell
from spmd_rl.base.waits import EVERY_SECONDS, FIRST_SECONDS, WaitMessage

WAITS = {
    "start": "starting: loading the models and the pipeline's other parts",
    "restore": "loading the checkpoint",
    "publish": "publishing the weights to the engine",
    "save": "writing the checkpoint",
    "eval": "evaluating",
}
"""Phases that are announced if long."""
FIRST_WAITS = {
    "generate": "generating; an engine may compile in the first step",
    "logprobs": "computing logprobs; the trainer may compile in the first step",
    "update": "training; the trainer may compile in the first step",
}
"""Phases that are announced in this process's first step."""


class PhaseReporter:
    """Watcher of a journal's phases (a `PhaseWatcher`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: list[tuple[str, float]] = []
        self._printed = 0.0
        self._closed = threading.Event()
        self.first_step = True
        """True until this process's first step ends."""

    def start(self, where: Callable[[], str]) -> None:
        """Start the thread. where: returns the collective that the rank is in, or nothing."""

        def look() -> None:
            while not self._closed.wait(1.0):
                if line := self.due(where()):
                    tell(line)

        # A daemon thread, so that it never keeps the process from ending.
        threading.Thread(target=look, name="waits", daemon=True).start()

    def close(self) -> None:
        """Stop printing, for the rest of the process."""
        self._closed.set()

    def enter(self, phase: str) -> None:
        """Begin a phase, inside open ones."""
        self._open.append((phase, self._clock()))

    def exit(self, phase: str) -> None:
        """End the innermost open phase."""
        self._open.pop()

    def due(self, where: str = "") -> str | None:
        """Return the line that is due now."""
        known = WAITS | FIRST_WAITS if self.first_step else WAITS
        now = self._clock()
        # A copy of the list, since the main thread changes it meanwhile.
        phase, began = next(((p, t) for p, t in reversed(self._open[:]) if p in known), ("", now))
        if WaitMessage.is_open or now - began < FIRST_SECONDS or now - self._printed < EVERY_SECONDS:
            return None
        self._printed = now
        text = "starting the engine" if where.startswith("engine: start") else known[phase]
        return f"{text} ({now - began:.0f} s)"
