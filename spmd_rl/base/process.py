"""Processes: death with the parent, reaping, open files, error reports for torchrun. Standard library only."""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

RETURNED = "returned"
LAUNCHER = "SPMD_RL_NODE"
"""Process id of `python -m spmd_rl node`, if it started this rank's torchrun."""
T = TypeVar("T")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel SIGKILL this process once its parent, of pid `parent` if known, is gone. No-op except on Linux.

    The signal follows the parent's *thread* that forked, so the starter must fork from a thread that lives as long as
    itself. OSError if the kernel refuses.
    """
    if sys.platform != "linux":
        return
    # Without `parent`, a parent with pid 1 is not taken for an orphan's: in a container it may be the starter.
    before = os.getppid() if parent is None else parent
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl: the kernel would then never send the signal.
    if os.getppid() != before:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Let the kernel make orphaned descendants children of this process, which has to reap them. OSError if refused."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_children() -> None:
    """Kill and reap until this process has no children, orphans of `adopt_orphans` included."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def raise_open_files() -> None:
    """Raise this process's limit of open files to the maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20 if hard == resource.RLIM_INFINITY else hard, hard))


def running(pid: int) -> bool:
    """Return True if a process has not exited; a zombie has."""
    try:
        # The command name in parentheses may itself hold spaces and parentheses, so the fields are read after the last
        # one.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


class Overtime(BaseException):
    """The error at a deadline. No `Exception`, so that slow code does not handle it."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise Overtime inside the block after `seconds`, in any Python code. Main thread alone; uses SIGALRM."""

    def over(*_: object) -> None:
        raise Overtime(f"not finished after {seconds:g} s")

    handler, timer = signal.signal(signal.SIGALRM, over), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def in_background(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` on a new daemon thread, and return its future."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            # Also for KeyboardInterrupt and the like: the waiting thread must not block forever.
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def contained(work: Callable[[Callable[[str], None]], None], seconds: float) -> tuple[list[str], str]:
    """Run `work(say)` in a forked process; return the lines that it said and why it failed, or an empty string.

    `work` may exit, hang, kill itself or start processes, which are killed. Call it before there are threads.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    lines, says = os.pipe()
    end, ends = os.pipe()
    # Taken before the fork: afterwards the parent may be gone, and the pid another one.
    rank = os.getpid()
    # Two forks: the keeper survives the work whatever it does, adopts its orphans and kills them.
    if (keeper := os.fork()) == 0:
        with _final():
            os.close(lines)
            die_with_parent(rank)
            adopt_orphans()
            outcome = _watch(_fork_work(work, says), seconds)
            kill_children()
            os.write(ends, outcome.encode())
    os.close(says)
    os.close(ends)
    with os.fdopen(lines) as lines_said, os.fdopen(end) as outcome:
        # The lines are read first: a full pipe would block the child.
        said, how = lines_said.read().splitlines(), outcome.read()
    os.waitpid(keeper, 0)
    return (said[:-1], "") if said[-1:] == [RETURNED] else (said, how)


def _fork_work(work: Callable[[Callable[[str], None]], None], says: int) -> int:
    keeper = os.getpid()
    if (child := os.fork()) == 0:
        with _final():
            die_with_parent(keeper)
            work(lambda line: os.write(says, line.encode() + b"\n"))
            os.write(says, f"{RETURNED}\n".encode())
    return child


def _watch(child: int, seconds: float) -> str:
    # A pidfd cannot be reused by another process, and `select` on it has a timeout, which `waitpid` lacks.
    pidfd = os.pidfd_open(child)
    if not select.select([pidfd], [], [], seconds)[0]:
        return f"takes over {seconds:g} s"
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"ends its process with code {code}" if code >= 0 else f"ends its process by {signal.Signals(-code).name}"


@contextlib.contextmanager
def _final() -> Iterator[None]:
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        yield
    finally:
        if sys.exc_info()[0] not in (None, SystemExit):
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        error = sys.exc_info()[1]
        code = error.code if isinstance(error, SystemExit) else None
        # `os._exit`: unwinding would run the parent's `finally` blocks and exit handlers a second time.
        os._exit(code if isinstance(code, int) else int(error is not None))


def tell_torchrun(text: str) -> None:
    """Write why this process fails to torchrun's error file, if any, so that its report shows `text`."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
