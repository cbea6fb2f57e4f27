"""The fate of a process tree: a child that must not outlive the process that started it. Standard library only.

Ranks call it under `torchrun`; sidecar hosts and workers call it everywhere. How a run ends is not decided here.

    die_with_parent(parent_pid)  # first line of the child's main
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel SIGKILL this process as soon as its parent is gone.

    `parent` is the pid of the process that started us, where the starter could tell us: if it died before we got
    here, the kernel would never tell, so we end at once. Without it, a parent of pid 1 is not taken for an orphan's
    (in a container the starter may well be pid 1). The signal follows the parent's *thread* that forked us, so the
    starter must fork from a thread that lives as long as itself. A no-op where the kernel is not Linux.
    """
    if sys.platform != "linux":
        return
    before = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != before:
        os.kill(os.getpid(), signal.SIGKILL)
