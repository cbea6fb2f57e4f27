"""A rank's watchdog thread: sends heartbeats, ends the process when the run ends, and the run at a stall.

A stall is `stall_seconds` without progress of *any* rank. Long library calls report `World.progress`.

The watchdog waits for the store, which never answers if packets are lost. A second thread, the clock, ends the process
after `stall_seconds` without an answer, not counting pauses of the process.
"""

import threading
import time

import torch.distributed as dist

from spmd_rl.distributed.heartbeat import Heartbeats
from spmd_rl.distributed.report import cut_off_report, hang_report
from spmd_rl.distributed.shutdown import GRACE_SECONDS, End, Shutdown

STOP_SECONDS = 5.0
TICK_SECONDS = 0.25
"""Seconds between checks for an announced end, for up to 1024 ranks"""


class Watchdog:
    """A rank's watchdog, started on construction; `stop` it before the groups are destroyed."""

    def __init__(self, heartbeats: Heartbeats, shutdown: Shutdown, stall_seconds: float, stacks: str) -> None:
        """Start the threads. Infinite `stall_seconds` ignore stalls."""
        self._heartbeats, self._shutdown = heartbeats, shutdown
        self._stall_seconds, self._stacks = stall_seconds, stacks
        self._progress = -1
        self._moved = self._ticked = self._beaten = time.monotonic()
        self._answered = 0
        self._tick_seconds = TICK_SECONDS * max(1.0, len(heartbeats.peers) / 1024)
        self._stopped = threading.Event()
        self.leaving = False
        """True if this rank is leaving, when losing the store is no error"""
        # Sent before the thread starts, so that a rank that is stopped at once has a heartbeat.
        heartbeats.beat()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        threading.Thread(target=self._run_clock, name="watchdog clock", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread, and wait for its end, briefly if the store does not answer."""
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
            # At most two ticks count: after a stop of this process the store had no chance to answer.
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
        # A stopped process saw nothing of the others' progress in that time.
        if asleep > self._heartbeats.silent_seconds:
            self._moved += asleep
        self._ticked = now
        if now - self._beaten > self._heartbeats.beat_seconds - self._tick_seconds / 2:
            self._beaten, progress = now, self._heartbeats.beat()
            if progress != self._progress:
                self._progress, self._moved = progress, now
        end, rank = self._shutdown.announced(), self._heartbeats.me.rank
        if end is None and now - self._moved > self._stall_seconds:
            end = self._shutdown.announce(End("stall", rank, "no progress"))
            # All ranks see the stall at once; the first to announce it reads all positions, so the store is not
            # flooded.
            if end.kind == "stall" and end.rank == rank:
                report = hang_report(self._heartbeats.read(), self._stall_seconds, self._stacks)
                end = End("stall", rank, report)
        if end is not None:
            self._end(end)

    def _end(self, end: End) -> None:
        if end.kind == "error" and self._stopped.wait(GRACE_SECONDS):
            # The failed rank exits first, and this rank's main thread may fail of the same cause and explain it better.
            return
        if self._shutdown.claim():
            self._shutdown.end_with(end)
        self._stopped.set()
