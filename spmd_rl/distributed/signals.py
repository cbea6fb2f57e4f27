"""SIGTERM and SIGINT on a dedicated thread, so that a rank deep in C++ ends at once instead of after its call.

Not `sigwait`: libraries start threads at import (OpenBLAS does) that do not mask the signals, and the kernel may
deliver SIGTERM to one of those, which kills the process. Python's C-level handler instead writes the signal's number to
a pipe from any thread; our thread reads the pipe. The Python-level handler does nothing and may be late.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable


def _leave_it_to_the_pipe(signum: int, frame: object) -> None:
    """Do nothing; runs in the main thread, at any later time."""


class SignalThread:
    """A thread that calls `act(signum)` for each of `signals`. Children start with the default handlers."""

    def __init__(self, signals: Iterable[signal.Signals], act: Callable[[signal.Signals], None]) -> None:
        """Install the handlers. Main thread only."""
        self._signals, self._act = frozenset(signals), act
        self._read, self._write = os.pipe()
        # `set_wakeup_fd` requires it: the C-level handler must never block.
        os.set_blocking(self._write, False)
        self._handlers = {signum: signal.signal(signum, _leave_it_to_the_pipe) for signum in self._signals}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._closed = False
        os.register_at_fork(after_in_child=self._forked)
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the previous handlers. Main thread only."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._closed = True
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _forked(self) -> None:
        """Keep a child that does not exec from ending its parent by a write to our pipe."""
        # A forked child inherits the wakeup descriptor: a signal to it would reach this process.
        if not self._closed:
            signal.set_wakeup_fd(-1)
            for signum in self._signals:
                signal.signal(signum, signal.SIG_DFL)

    def _run(self) -> None:
        while received := os.read(self._read, 1):
            if received[0] in self._signals:
                self._act(signal.Signals(received[0]))
