"""The watchdog thread of a rank: sends heartbeats, ends the process when the run ends, and ends the run at a stall.

A stall is *no rank's* progress counter moving for `stall_seconds`, never mere time in a phase: a rank may work for an
hour in one call as long as anyone moves. One that works long in a library calls `World.progress`.

All that is asked of the store, which waits for ever where packets are lost. A second thread, the clock, asks nobody: it
ends the process where the store has not answered for `stall_seconds`. It counts time in which it ran: a rank that was
stopped, or whose main thread kept the GIL, has not been cut off.
"""

import threading
import time

import torch.distributed as dist

from spmd_rl.distributed.heartbeat import Heartbeats
from spmd_rl.distributed.report import cut_off_report, hang_report
from spmd_rl.distributed.shutdown import GRACE_SECONDS, End, Shutdown

STOP_SECONDS = 5.0
TICK_SECONDS = 0.25
"""Between looks whether another rank has announced the end, of up to 1024 ranks; of 4096, a second."""


class Watchdog:
    """Starts with its construction; `stop` it before the groups are destroyed."""

    def __init__(self, heartbeats: Heartbeats, shutdown: Shutdown, stall_seconds: float, stacks: str) -> None:
        """`stall_seconds`: infinity looks for no stalls."""
        self._heartbeats, self._shutdown = heartbeats, shutdown
        self._stall_seconds, self._stacks = stall_seconds, stacks
        self._progress = -1
        self._moved = self._ticked = self._beaten = time.monotonic()
        self._answered = 0
        """How often the store has answered."""
        self._tick_seconds = TICK_SECONDS * max(1.0, len(heartbeats.peers) / 1024)
        self._stopped = threading.Event()
        self.leaving = False
        """Whether this rank is about to leave, and no longer minds a store that is gone."""
        heartbeats.beat()  # a rank that is stopped at once has sent a heartbeat
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        threading.Thread(target=self._run_clock, name="watchdog clock", daemon=True).start()

    def stop(self) -> None:
        """Returns when the thread has ended, or soon if it waits for a store that does not answer."""
        self._stopped.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._tick_seconds):
                self._tick()
                self._answered += 1
        except dist.DistError as lost:
            if not self.leaving and self._shutdown.claim():
                rank = self._heartbeats.me.rank
                self._shutdown.end_with(End("error", rank, f"the store is lost, its process or node is gone: {lost}"))

    def _run_clock(self) -> None:
        looked, answered, silent = time.monotonic(), self._answered, 0.0
        while silent <= self._stall_seconds:
            if self._stopped.wait(self._tick_seconds):
                return
            now = time.monotonic()
            silent += min(now - looked, 2 * self._tick_seconds)
            if answered != self._answered:
                answered, silent = self._answered, 0.0
            looked = now
        if self._shutdown.claim():
            report = cut_off_report(self._heartbeats.own_heartbeat(), silent, self._stall_seconds, self._stacks)
            self._shutdown.end_with(End("cut off", self._heartbeats.me.rank, report))

    def _tick(self) -> None:
        now = time.monotonic()
        asleep = now - self._ticked
        if asleep > self._heartbeats.silent_seconds:  # we were stopped, and saw nothing of what the others did
            self._moved += asleep
        self._ticked = now
        if now - self._beaten > self._heartbeats.beat_seconds - self._tick_seconds / 2:
            self._beaten, progress = now, self._heartbeats.beat()
            if progress != self._progress:
                self._progress, self._moved = progress, now
        end, rank = self._shutdown.announced(), self._heartbeats.me.rank
        if end is None and now - self._moved > self._stall_seconds:
            end = self._shutdown.announce(End("stall", rank, "no progress"))
            if end.kind == "stall" and end.rank == rank:  # all see it at once: one of them reads where all are
                report = hang_report(self._heartbeats.read(), self._stall_seconds, self._stacks)
                end = End("stall", rank, report)
        if end is not None:
            self._end(end)

    def _end(self, end: End) -> None:
        """End this process, unless its main thread is already about it."""
        if end.kind == "error" and self._stopped.wait(GRACE_SECONDS):
            return  # the rank that failed exits first, and our main thread may fail of the same cause
        if self._shutdown.claim():
            self._shutdown.end_with(end)
        self._stopped.set()
