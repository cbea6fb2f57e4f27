"""How a rank's process ends when the run does not come to its own end: for one reason on all ranks, and quickly.

The first rank to fail, to see a stall or to be signalled writes the reason to the store; the others read it within a
second. Nothing here meets other ranks. A process that ends here does not unwind: its `with` blocks are not left.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import msgspec
import torch.distributed as dist

from spmd_rl.base.errors import printable
from spmd_rl.base.process import running, tell_torchrun
from spmd_rl.distributed.heartbeat import Heartbeats
from spmd_rl.distributed.journal import Journal

_CALLBACK_SECONDS = 3.0
_PEER_SECONDS = _STORE_SECONDS = 1.0
_END_SECONDS = 10.0
"""From then on no callback, disk or lock keeps this process."""
GRACE_SECONDS = 0.5
"""Two ticks of the watchdog: by then the other ranks have read the reason."""
_KEY = "end"
T = TypeVar("T")


class End(msgspec.Struct, frozen=True):
    """Why the run ends, as the first rank to know it wrote for the others."""

    kind: Literal["error", "stall", "signal", "cut off"]
    rank: int
    text: str


class Shutdown:
    """At most one thread of a process ends it: the one whose `claim` is granted."""

    def __init__(self, store: dist.Store, heartbeats: Heartbeats, journal: Journal, run_dir: Path) -> None:
        self._store, self._heartbeats, self._journal, self._run_dir = store, heartbeats, journal, run_dir
        self._rank = heartbeats.me.rank
        self._claimed = threading.Lock()
        self.callbacks: list[Callable[[], None]] = []

    def claim(self) -> bool:
        """Whether the caller is the one to end this process."""
        return self._claimed.acquire(blocking=False)

    def announce(self, end: End) -> End:
        """Write why the run ends, for all ranks. Returns the first reason written, which may be another rank's."""

        def write() -> End:
            found = self._store.compare_set(_KEY, "", msgspec.msgpack.encode(end))
            return msgspec.msgpack.decode(found, type=End)

        return _within(_STORE_SECONDS, write, end)  # without a store the other ranks know anyway

    def announced(self) -> End | None:
        """Return why the run ends, if a rank has announced it."""
        return msgspec.msgpack.decode(self._store.get(_KEY), type=End) if self._store.check([_KEY]) else None

    def end_with(self, end: End) -> NoReturn:
        """End this process because of what another rank announced, of a stall, or because it is cut off."""
        if end.kind in ("stall", "cut off"):
            faulthandler.dump_traceback_later(_END_SECONDS, exit=True, file=2)
            self._dump_stacks()
            if end.rank == self._rank:
                name = "hang.txt" if end.kind == "stall" else f"hang-rank-{self._rank}.txt"
                print_error(end.text)
                with contextlib.suppress(OSError):
                    (self._run_dir / name).write_text(end.text + "\n")
            time.sleep(GRACE_SECONDS)  # our end breaks the others' connections: let them dump where they hang
            self.exit(1, "ended by a stall" if end.kind == "stall" else end.text.splitlines()[0], end)
        print_error(text := f"rank {self._rank}: ended because {end.text}")
        self.exit(1, text, end)

    def exit(self, code: int, text: str, end: End | None = None) -> NoReturn:
        """Report `text` to journal and torchrun, run rank 0's callbacks for a while, kill this node's ranks, exit."""
        began = time.monotonic()
        faulthandler.dump_traceback_later(_END_SECONDS, exit=True, file=2)  # the disk may be out of reach as well
        with contextlib.suppress(OSError):
            self._journal.note("error", text=text)
        if code:
            tell_torchrun(text)
        failing = end.rank if end and end.kind == "error" else None  # it unwinds by itself
        peers = [peer for peer in self._heartbeats.local_peers() if peer.rank != failing]
        live = _within(_STORE_SECONDS, lambda: self._heartbeats.live(peers), {peer.rank for peer in peers})
        if end and end.kind == "stall":
            for peer in peers:
                if peer.rank not in live:
                    _send(peer.pid, signal.SIGUSR1)  # its stacks, if a call that holds the GIL silenced it
        for callback in [*self.callbacks * (self._rank == 0), sys.stdout.flush]:
            _within(began + _CALLBACK_SECONDS - time.monotonic(), callback, None)
        if all(self._rank < peer.rank for peer in peers if peer.rank in live):
            _kill_at([peer.pid for peer in peers], began + _PEER_SECONDS)
        os._exit(code)

    def _dump_stacks(self) -> None:
        faulthandler.dump_traceback(2, all_threads=True)
        path = self._journal.path.parent / f"stacks-rank-{self._rank}.txt"
        with contextlib.suppress(OSError), open(path, "w") as out:
            faulthandler.dump_traceback(out, all_threads=True)


def _within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """Return what `call` returns, on a thread of its own; `otherwise` if that takes longer, the store is lost or it
    raises, which is printed."""
    found = [otherwise]

    def run() -> None:
        with contextlib.suppress(dist.DistError):
            found[0] = call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    return found[0]


def print_error(text: str) -> None:
    """Write straight to stderr: a thread that hangs may hold the lock of `sys.stderr`."""
    with contextlib.suppress(OSError):
        os.write(2, (printable(text) + "\n").encode())


def _kill_at(pids: list[int], deadline: float) -> None:
    """Send SIGKILL to those that still run at the deadline: a stopped one never exits; its agent waits 30 s."""
    while time.monotonic() < deadline and any(map(running, pids)):
        time.sleep(0.05)
    for pid in pids:
        _send(pid, signal.SIGKILL)


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
