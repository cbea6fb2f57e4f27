"""What a process asks of the system for itself: to die with its parent, to keep its memory. Standard library only.

Ranks call `die_with_parent` under `torchrun`; sidecar hosts and workers call it everywhere, in the first line of their
main. How a run ends is not decided here.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers for `mallopt`."""


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


def keep_freed_memory() -> None:
    """Let malloc keep large blocks that are freed, instead of giving them back to the kernel.

    A training step on CPU allocates the same hundreds of megabytes again and again; by default glibc maps and unmaps
    each, and the kernel zeroes every page anew. Resident memory then stays at its peak. A no-op without glibc, and
    where the user has set one of malloc's own variables.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt") and not chosen:
        libc.mallopt(M_MMAP_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
