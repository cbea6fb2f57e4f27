"""`Supervisor`: heartbeats, watchdog and signals, so that no rank ends or hangs silently."""

import faulthandler
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.base.process import running
from spmd_rl.config.main import record
from spmd_rl.distributed.collectives import Collectives
from spmd_rl.distributed.heartbeat import Heartbeats
from spmd_rl.distributed.journal import Journal
from spmd_rl.distributed.membership import Membership
from spmd_rl.distributed.report import Peer
from spmd_rl.distributed.shutdown import End, Shutdown, print_error
from spmd_rl.distributed.watchdog import Watchdog


def _leave_it_to_the_pipe(signum: int, frame: object) -> None:
    """Do nothing, in the main thread, at any later time."""


class SignalThread:
    """A thread that calls `act(signum)` for each of `signals`, so that a rank deep in C++ ends at once. Children
    start with default handlers."""

    # Not `sigwait`: libraries start threads at import (OpenBLAS does) that do not mask the signals, and the kernel may
    # deliver SIGTERM to one of those, which kills the process. Python's C-level handler instead writes the signal's
    # number to a pipe from any thread; our thread reads the pipe.

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
        # A child that does not exec would end its parent by a write to our pipe.
        if not self._closed:
            signal.set_wakeup_fd(-1)
            for signum in self._signals:
                signal.signal(signum, signal.SIG_DFL)

    def _run(self) -> None:
        while received := os.read(self._read, 1):
            if received[0] in self._signals:
                self._act(signal.Signals(received[0]))


_UNWIND_SECONDS = 5
_TORCHRUN_SECONDS = 30
"""Default of torchrun's --shutdown-timeout, after which it kills ranks"""
_SAME_SECONDS = 2.0
"""Seconds within which one signal comes from both launcher and scheduler"""


class Supervisor:
    """One rank's supervisor, over a clone of the store."""

    def __init__(
        self,
        me: Membership,
        store: dist.Store,
        collectives: Collectives,
        journal: Journal,
        run_dir: Path,
        stall_seconds: float,
        signals: Sequence[signal.Signals],
    ) -> None:
        """[all] Start watching; main thread only. stall_seconds: may be infinite. signals: ask the run to save and
        end; a second one, or one before the first step, ends it at once."""
        self._me = me
        # The barrier lets all ranks read their clocks within a moment, from which ages of heartbeats are computed.
        collectives.barrier("start: clocks")
        mine = Peer(me.rank, me.node, socket.gethostname(), os.getpid(), time.monotonic())
        peers = [Peer(*peer) for peer in collectives.gather("start: peers", mine)]
        self._journal, self._announced, self._run_dir = journal, False, run_dir
        self._asked_at: float | None = None
        self._heartbeats = Heartbeats(store, mine, peers, journal)
        self.shutdown = Shutdown(store, self._heartbeats, journal, run_dir)
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        stacks = str(journal.path.parent / "stacks-rank-*.txt")
        self._watchdog = Watchdog(self._heartbeats, self.shutdown, stall_seconds, stacks)
        self._signals = SignalThread(signals, self._signalled)

    def leaving(self) -> None:
        """Accept the store's loss from now on: its process may leave first."""
        self._watchdog.leaving = True

    def close(self) -> None:
        """Stop watching, and restore signals' default effect."""
        if not self.shutdown.claim():
            _wait_for_the_end()
        self._stop()

    def on_exception(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Announce the exception to other ranks, as a block's `__exit__`, and let it propagate.

        Only the first call counts. A consequence of another rank's end (a broken connection) ends the process here with
        a line that names that rank. If a rank was killed, `RunFailed` names it.
        """
        if kind is None or self._announced:
            return
        self._announced = True
        if not self.shutdown.claim():
            _wait_for_the_end()
        text = f"rank {self._me.rank} failed: {kind.__name__}: {error}".splitlines()[0]
        gone = "" if (all_alike := issubclass(kind, UserError | RunFailed)) else self._killed_ranks()
        text += gone
        first = self.shutdown.announce(End("error", self._me.rank, text))
        if first.rank != self._me.rank and not all_alike:
            self.shutdown.end_with(first)
        self._journal.note("error", text=text)
        if self._me.size == 1:
            self._stop()
        # Destructors may hang while the interpreter exits, and would delay the other ranks.
        else:
            faulthandler.dump_traceback_later(_UNWIND_SECONDS, exit=True)
        # A killed rank explains more than the connection that broke here.
        if gone and isinstance(error, Exception):
            raise RunFailed(text, "".join(traceback.format_exception(error))) from error

    def _killed_ranks(self, seconds: float = 0.1) -> str:
        peers = self._heartbeats.local_peers()
        # A dying process's connections break shortly before its pid is gone.
        time.sleep(seconds * bool(peers))
        gone = [str(peer.rank) for peer in peers if not running(peer.pid)]
        return f" (rank {', '.join(gone)} is gone: killed{self._since_signal()}?)" if gone else ""

    def _since_signal(self) -> str:
        waits = f"s after the signal, where torchrun waits --shutdown-timeout={_TORCHRUN_SECONDS} s"
        asked = self._asked_at if self._me.launched else None
        return "" if asked is None else f" {time.monotonic() - asked:.0f} {waits}"

    def _stop(self) -> None:
        self._watchdog.stop()
        self._signals.close()
        faulthandler.unregister(signal.SIGUSR2)

    def _signalled(self, signum: signal.Signals) -> None:
        if self._asked_at is None:
            if number := self.shutdown.ask_to_stop(signum):
                self._asked_at = time.monotonic()
                if number == 1:
                    text = "the run ends once this step is finished and saved; a second signal ends it at once"
                    limit = f"; torchrun kills it after --shutdown-timeout, {_TORCHRUN_SECONDS} s by default"
                    print_error(f"{signum.name}: {text}{limit * self._me.launched}")
                return
        elif self._me.launched and time.monotonic() - self._asked_at < _SAME_SECONDS:
            return
        if self.shutdown.claim():
            text = f"rank {self._me.rank} received {signum.name}"
            gone = self._killed_ranks(0.0)
            first = self.shutdown.announce(End("signal", self._me.rank, text))
            # Ranks that are gone without an announcement were killed.
            if gone and first.rank == self._me.rank:
                text += gone
                record(self._run_dir, text)
                print_error(f"error: {text}")
            elif self._me.rank == 0:
                print_error(f"{text}: ending")
            self.shutdown.exit(128 + signum, text)


def _wait_for_the_end() -> None:
    threading.Event().wait()
