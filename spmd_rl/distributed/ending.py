"""How a rank's process ends when the run does not come to its own end: one word for all ranks, then quickly.

The first rank to fail, to see a stall or to be signalled writes that word to the store; the others read it within a
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
from typing import Literal, NoReturn

import msgspec
import torch.distributed as dist

from spmd_rl.distributed.heartbeat import Heartbeats
from spmd_rl.distributed.journal import Journal

_CALLBACK_SECONDS = 3.0
_PEER_SECONDS = 1.0
GRACE_SECONDS = 0.5
"""Two ticks of the watchdog: by then the peers have read a word."""
_KEY = "end"


class End(msgspec.Struct, frozen=True):
    """Why the run ends, as the first rank to know told the others."""

    kind: Literal["error", "stall", "signal"]
    rank: int
    text: str


class Ending:
    """At most one thread of a process ends it: the one whose `claim` is granted."""

    def __init__(self, store: dist.Store, heartbeats: Heartbeats, journal: Journal, run_dir: Path) -> None:
        self._store, self._heartbeats, self._journal, self._run_dir = store, heartbeats, journal, run_dir
        self._rank = heartbeats.me.rank
        self._claimed = threading.Lock()
        self.callbacks: list[Callable[[], None]] = []

    def claim(self) -> bool:
        """Whether the caller is the one to end this process."""
        return self._claimed.acquire(blocking=False)

    def declare(self, end: End) -> End:
        """Tell all ranks; returns the word that stands, which is another's if that came first."""
        standing = [end]

        def tell() -> None:
            with contextlib.suppress(dist.DistError):  # without a store the peers know anyway
                word = self._store.compare_set(_KEY, "", msgspec.msgpack.encode(end))
                standing[0] = msgspec.msgpack.decode(word, type=End)

        _bounded(tell, 1.0)
        return standing[0]

    def declared(self) -> End | None:
        """The word that stands, if there is one."""
        return msgspec.msgpack.decode(self._store.get(_KEY), type=End) if self._store.check([_KEY]) else None

    def follow(self, end: End) -> NoReturn:
        """End this process because of another rank's word, or of a stall."""
        if end.kind == "stall":
            self._dump_stacks()
            if min(self._heartbeats.live()) == self._rank:
                with contextlib.suppress(OSError):
                    (self._run_dir / "hang.txt").write_text(end.text + "\n")
                say(end.text)
            time.sleep(GRACE_SECONDS)  # our end breaks the others' connections: let them dump where they hang
            self.depart(1, "ended by a stall", end)
        say(text := f"rank {self._rank}: ended because {end.text}")
        self.depart(1, text, end)

    def depart(self, code: int, text: str, end: End | None = None) -> NoReturn:
        """Journal `text`, give rank 0's callbacks their seconds, see the local peers off, exit with `code`."""
        began = time.monotonic()
        with contextlib.suppress(OSError):
            self._journal.note("error", text=text)
        failing = end.rank if end and end.kind == "error" else None  # it unwinds by itself
        peers = [peer for peer in self._heartbeats.local_peers() if peer.rank != failing]
        live = self._heartbeats.live()
        if end and end.kind == "stall":
            for peer in peers:
                if peer.rank not in live:
                    _send(peer.pid, signal.SIGUSR1)  # its stacks, if a call that holds the GIL silenced it
        for callback in [*self.callbacks * (self._rank == 0), sys.stdout.flush]:
            _bounded(callback, began + _CALLBACK_SECONDS - time.monotonic())
        if all(self._rank < peer.rank for peer in peers if peer.rank in live):
            _see_off([peer.pid for peer in peers], began + _PEER_SECONDS)
        os._exit(code)

    def _dump_stacks(self) -> None:
        faulthandler.dump_traceback(2, all_threads=True)
        path = self._journal.path.parent / f"stacks-rank-{self._rank}.txt"
        with contextlib.suppress(OSError), open(path, "w") as out:
            faulthandler.dump_traceback(out, all_threads=True)


def _bounded(call: Callable[[], object], seconds: float) -> None:
    """Run `call` on a thread of its own and wait no longer than `seconds`; what it raises is printed, no more."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))


def say(text: str) -> None:
    """Straight to stderr: a thread that hangs may hold the lock of `sys.stderr`."""
    with contextlib.suppress(OSError):
        os.write(2, (text + "\n").encode())


def _see_off(pids: list[int], deadline: float) -> None:
    """SIGKILL what is left at the deadline: a stopped process never exits, and the agent would wait 30 s for it."""
    while time.monotonic() < deadline and any(map(running, pids)):
        time.sleep(0.05)
    for pid in pids:
        _send(pid, signal.SIGKILL)


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def running(pid: int) -> bool:
    """Whether it has not exited; one that its agent has yet to reap has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
