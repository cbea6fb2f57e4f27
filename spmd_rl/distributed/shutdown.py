"""The premature end of a rank's process, quickly and for one reason on all ranks.

The first rank that fails, stalls or gets a signal writes the reason to the store; others read it within a second.
Nothing meets other ranks, and no `with` block is left.
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
from spmd_rl.distributed.stop import StopRequest

_CALLBACK_SECONDS = 3.0
_PEER_SECONDS = _STORE_SECONDS = 1.0
_END_SECONDS = 10.0
"""Seconds after which no callback, disk or lock delays the exit"""
GRACE_SECONDS = 0.5
"""Seconds until other ranks have read the reason: two watchdog ticks"""
_KEY = "end"
T = TypeVar("T")


class End(msgspec.Struct, frozen=True):
    """Reason for the run's end, from the first rank to know it."""

    kind: Literal["error", "stall", "signal", "cut off"]
    rank: int
    text: str


class Shutdown:
    """The end of this process, by the one thread whose `claim` is granted."""

    def __init__(self, store: dist.Store, heartbeats: Heartbeats, journal: Journal, run_dir: Path) -> None:
        self._store, self._heartbeats, self._journal, self._run_dir = store, heartbeats, journal, run_dir
        self._rank = heartbeats.me.rank
        self._claimed = threading.Lock()
        self.callbacks: list[Callable[[], None]] = []

    def claim(self) -> bool:
        """Return True if the caller ends this process."""
        return self._claimed.acquire(blocking=False)

    def announce(self, end: End) -> End:
        """Write the reason for all ranks; return the first one written, perhaps another rank's."""

        def write() -> End:
            found = self._store.compare_set(_KEY, "", msgspec.msgpack.encode(end))
            return msgspec.msgpack.decode(found, type=End)

        # Without a store the other ranks notice by themselves.
        return _within(_STORE_SECONDS, write, end)

    def ask_to_stop(self, signum: signal.Signals) -> int:
        """Ask the run to save its step and end, see `StopRequest.ask`; 0 if the store does not answer."""
        return _within(_STORE_SECONDS, lambda: StopRequest(self._store).ask(signum), 0)

    def announced(self) -> End | None:
        """Return the announced reason, if any."""
        return msgspec.msgpack.decode(self._store.get(_KEY), type=End) if self._store.check([_KEY]) else None

    def end_with(self, end: End) -> NoReturn:
        """End this process after another rank's announcement, a stall, or a lost store."""
        if end.kind in ("stall", "cut off"):
            faulthandler.dump_traceback_later(_END_SECONDS, exit=True, file=2)
            self._dump_stacks()
            if end.rank == self._rank:
                name = "hang.txt" if end.kind == "stall" else f"hang-rank-{self._rank}.txt"
                print_error(end.text)
                with contextlib.suppress(OSError):
                    (self._run_dir / name).write_text(end.text + "\n")
            # This process's exit breaks the others' connections: let them dump their stacks where they hang first.
            time.sleep(GRACE_SECONDS)
            self.exit(1, "ended by a stall" if end.kind == "stall" else end.text.splitlines()[0], end)
        print_error(text := f"rank {self._rank}: ended because {end.text}")
        self.exit(1, text, end)

    def exit(self, code: int, text: str, end: End | None = None) -> NoReturn:
        """Report `text` to journal and torchrun, briefly run rank 0's callbacks, kill this node's ranks, exit."""
        began = time.monotonic()
        # The disk may be unreachable as well: from here on a timer ends the process in any case.
        faulthandler.dump_traceback_later(_END_SECONDS, exit=True, file=2)
        with contextlib.suppress(OSError):
            self._journal.note("error", text=text)
        if code:
            tell_torchrun(text)
        # The failed rank unwinds by itself, and is not killed.
        failing = end.rank if end and end.kind == "error" else None
        peers = [peer for peer in self._heartbeats.local_peers() if peer.rank != failing]
        live = _within(_STORE_SECONDS, lambda: self._heartbeats.live(peers), {peer.rank for peer in peers})
        if end and end.kind == "stall":
            for peer in peers:
                if peer.rank not in live:
                    # A call that holds the GIL may have silenced it: faulthandler's C handler still writes its stacks.
                    _send(peer.pid, signal.SIGUSR2)
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
    """Return `call`'s result from a new thread; `otherwise` if it is late, raises, or the store is lost."""
    found = [otherwise]

    def run() -> None:
        with contextlib.suppress(dist.DistError):
            found[0] = call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    return found[0]


def print_error(text: str) -> None:
    """Write directly to stderr, unbuffered."""
    # Not `sys.stderr`: a hanging thread may hold its lock.
    with contextlib.suppress(OSError):
        # One system call below Python's buffered stream.
        os.write(2, (printable(text) + "\n").encode())


def _kill_at(pids: list[int], deadline: float) -> None:
    # A stopped process never exits by itself, and its agent would wait 30 s for it.
    while time.monotonic() < deadline and any(map(running, pids)):
        time.sleep(0.05)
    for pid in pids:
        _send(pid, signal.SIGKILL)


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
