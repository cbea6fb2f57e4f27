"""The lifetime of processes: when children are killed, who reaps them, what a launcher is told. Standard library only.

die_with_parent(parent_pid)  # first line of the child's main
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel SIGKILL this process as soon as its parent is gone.

    `parent` is the pid of the process that started this one, if it is known: if that process died before this call, the
    kernel would never send the signal, so this process ends at once. Without it, a parent with pid 1 is not taken for
    an orphan's (in a container it may well be the starter). The signal follows the parent's *thread* that forked, so
    the starter must fork from a thread that lives as long as itself. OSError if the kernel refuses. Does nothing on
    systems other than Linux.
    """
    if sys.platform != "linux":
        return
    before = os.getppid() if parent is None else parent
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != before:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Let the kernel make orphaned descendants children of this process, which has to reap them. OSError if refused."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def tell_torchrun(text: str) -> None:
    """Write why this process fails to where torchrun's agent looks for it, in the form that it knows.

    Its own report then shows `text`. Without torchrun, or where the file cannot be written, nothing happens.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
