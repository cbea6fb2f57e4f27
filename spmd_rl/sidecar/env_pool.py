"""The host's worker pool of one environment: a queue of resets, workers with slots, deadlines.

The clock of a call runs while its worker has it. With one slot, a late worker is killed. With several, only the call
fails: its thread is abandoned, and the worker ends after its last episode, or is killed if it does not answer a `Ping`.
The sessions of a dead worker are lost. Nothing here blocks.
"""

import contextlib
import socket
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from spmd_rl.sidecar import wire
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.fair_queue import FairQueue
from spmd_rl.sidecar.frames import FrameSocket
from spmd_rl.sidecar.process_pool import ProcessPool, WorkerProcess
from spmd_rl.types import LostReason

CHECK_SECONDS = 0.02
"""Interval of deadline checks."""
PING_SECONDS = 2.0
"""Time for a worker with a late thread to answer."""
END_SECONDS = 2.0
"""Time for a retiring worker to close its environments."""


class SlotOwner(Protocol):
    """Session of a pool."""

    reset: wire.ResetRequest
    """The pool replaces its `session` by the slot's index."""
    client: Hashable
    """Waiting clients get slots in turn."""

    def on_slot(self, slot: "Slot") -> None:
        """Note that the reset begins."""
        ...

    def on_reply(self, number: int, reply: msgspec.Raw) -> None:
        """Take the reply to a call."""
        ...

    def on_failure(self, reason: LostReason, detail: str, traceback: str = "") -> None:
        """Take the failure that ends the session."""
        ...


@dataclass(eq=False, repr=False, slots=True)
class Slot:
    """A worker's slot and its session."""

    worker: "_EnvWorker"
    index: int
    owner: SlotOwner | None
    number: int = 0
    """Number of the current or last call."""
    deadline: float = float("inf")
    """Infinite without a call."""


@dataclass(eq=False, repr=False, slots=True)
class _EnvWorker(WorkerProcess):
    free: list[int] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    episodes: int = 0
    retiring: bool = False
    """True if the worker gets no more episodes."""
    stuck: bool = False
    """True if one of its threads is abandoned."""


class EnvPool(ProcessPool[_EnvWorker]):
    """Workers of one environment. The host calls `tick` in each round."""

    def __init__(self, tag: str, spec: wire.EnvPoolSpec, loop: EventLoop) -> None:
        super().__init__(f"env.{tag}", spec, wire.FROM_ENV_WORKER, loop)
        self._queue: FairQueue[SlotOwner] = FairQueue()
        self._num_taken = 0
        self._num_running = 0
        self._replies = 0
        self._next_check = 0.0
        self._may_dispatch = False

    @property
    def busy(self) -> bool:
        """True if a worker starts, a call runs or a reset waits."""
        return not self.ready or bool(self._queue or self._num_running)

    def submit(self, owner: SlotOwner) -> None:
        """Queue a reset; the owner's callbacks follow."""
        if self.broken:
            owner.on_failure("error", self.broken)
        else:
            self._queue.push(owner.client, owner)
            self._may_dispatch = True

    def withdraw(self, owner: SlotOwner) -> None:
        """Remove a reset from the queue, if there."""
        self._queue.discard(owner.client, owner)

    def step(self, slot: Slot, number: int, action: str) -> None:
        """Send a step to the session's worker."""
        self._give(slot, wire.StepRequest(slot.index, number, action), number, self.spec.step_timeout)

    def release(self, slot: Slot) -> None:
        """Free a closed session's slot, after its running call."""
        slot.owner = None
        if slot.deadline == float("inf"):
            self._free(slot)

    def tick(self) -> None:
        """Enforce deadlines, replace workers and hand out resets."""
        if self.loop.now >= self._next_check:
            self._next_check = self.loop.now + CHECK_SECONDS
            self._check_deadlines()
            self._start_wanted()
            if not self.ready:
                # Counts as progress, or clients would give up a pool whose workers take long to start. The deadline
                # limits it.
                self.progress += 1
        if self._queue and self._may_dispatch:
            self._may_dispatch = False
            self._dispatch()

    def status(self) -> wire.PoolStatus:
        """Return the state of the pool."""
        ready = sum(worker.ready for worker in self.workers)
        counts = (self.spec.workers, ready, self._num_taken, len(self._queue), self._replies, self.deaths)
        return wire.PoolStatus(self.spec.target, *counts, self.broken)

    # -- workers --------------------------------------------------------------------------------------------------

    def _start_wanted(self) -> None:
        if not self.broken:
            fit = sum(not worker.retiring for worker in self.workers)
            wanted = min(self.spec.workers, max(1, self._num_taken + len(self._queue)))
            # Retiring workers count too: each may still play its last episodes.
            most = 2 * self.spec.workers
            self.start_workers(min(len(self.workers) + max(0, wanted - fit), most))

    def _new_worker(self, frames: FrameSocket, deadline: float) -> _EnvWorker:
        return _EnvWorker(frames, deadline, free=list(range(self.spec.slots))[::-1])

    def _on_message(
        self, worker: _EnvWorker, message: wire.Ready | wire.SessionReplies | wire.Pong | wire.Goodbye
    ) -> None:
        if isinstance(message, wire.Ready):
            self._may_dispatch = True
        if not worker.ending:
            worker.deadline = float("inf")
        if isinstance(message, wire.SessionReplies):
            for item in message.items:
                self._on_outcome(worker, item)
        elif isinstance(message, wire.Goodbye):
            self._retire(worker)

    def _on_outcome(self, worker: _EnvWorker, item: wire.SessionReply | wire.SessionFailure) -> None:
        slot = worker.slots.get(item.session)
        if slot is None or slot.deadline == float("inf"):
            return
        self._replies += 1
        self.progress += 1
        self._num_running -= 1
        slot.deadline = float("inf")
        if slot.owner is None:
            self._free(slot)
        elif isinstance(item, wire.SessionReply):
            slot.owner.on_reply(item.number, item.reply)
        else:
            self._fail(slot, item.reason, item.detail, item.traceback)

    def _on_death(self, worker: _EnvWorker) -> None:
        self._empty(worker, "its worker died")

    def _drop_work(self, reason: str) -> None:
        waiting, self._queue = self._queue, FairQueue()
        for worker in list(self.workers):
            self._empty(worker, reason)
        for owner in waiting:
            owner.on_failure("error", reason)

    # -- sessions -------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while self._queue:
            open_workers = [worker for worker in self.workers if worker.ready and worker.free and not worker.retiring]
            if not open_workers:
                return
            least = min(len(worker.slots) for worker in open_workers)
            for worker in open_workers:
                if self._queue and len(worker.slots) == least:
                    self._assign(worker, self._queue.pop())

    def _assign(self, worker: _EnvWorker, owner: SlotOwner) -> None:
        index = worker.free.pop()
        slot = worker.slots[index] = Slot(worker, index, owner)
        self._num_taken += 1
        worker.episodes += 1
        if self.spec.recycle_after and worker.episodes >= self.spec.recycle_after:
            worker.retiring = True
        owner.on_slot(slot)
        self._give(slot, msgspec.structs.replace(owner.reset, session=index), 0, self.spec.reset_timeout)

    def _give(self, slot: Slot, request: wire.ResetRequest | wire.StepRequest, number: int, seconds: float) -> None:
        slot.number, slot.deadline = number, self.loop.now + seconds
        self._num_running += 1
        self.send(slot.worker, wire.SessionRequests([request]))

    def _fail(self, slot: Slot, reason: LostReason, detail: str, traceback: str = "", usable: bool = True) -> None:
        owner, slot.owner = slot.owner, None
        self._free(slot, usable)
        if owner is not None:
            owner.on_failure(reason, detail, traceback)

    def _free(self, slot: Slot, usable: bool = True) -> None:
        worker = slot.worker
        if worker.slots.pop(slot.index, None) is None:
            return
        self.progress += 1
        self._num_taken -= 1
        if slot.deadline < float("inf"):
            self._num_running -= 1
            slot.deadline = float("inf")
        self._may_dispatch = True
        if usable:
            worker.free.append(slot.index)
        if worker.retiring and not worker.slots:
            self._end(worker)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _check_deadlines(self) -> None:
        now = self.loop.now
        for worker in [worker for worker in self.workers if now > worker.deadline]:
            if worker.ready:
                self.deaths += not worker.ending
                self.remove(worker)
                self._empty(worker, "its worker hung and was killed")
            else:
                self.late_to_start(worker)
        if self._num_running:
            late = [slot for worker in self.workers for slot in worker.slots.values() if now > slot.deadline]
            for slot in late:
                self._on_late(slot)

    def _on_late(self, slot: Slot) -> None:
        worker = slot.worker
        verb, seconds = ("step", self.spec.step_timeout) if slot.number else ("reset", self.spec.reset_timeout)
        detail = f"its {verb} took longer than {seconds:g} s"
        worker.retiring = worker.stuck = True
        if len(worker.slots) > 1 and worker.deadline == float("inf"):
            worker.deadline = self.loop.now + PING_SECONDS
            self.send(worker, wire.Ping())
        self._fail(slot, "timeout", detail, usable=False)

    def _retire(self, worker: _EnvWorker) -> None:
        worker.retiring = True
        if not worker.slots:
            self._end(worker)

    def _end(self, worker: _EnvWorker) -> None:
        # A working one may close its environments until its deadline.
        if worker.stuck:
            self.deaths += 1
            self.remove(worker)
        else:
            worker.ending, worker.deadline = True, self.loop.now + END_SECONDS
            with contextlib.suppress(OSError):
                worker.frames.socket.shutdown(socket.SHUT_WR)

    def _empty(self, worker: _EnvWorker, detail: str) -> None:
        worker.retiring = False  # it needs no end
        for slot in list(worker.slots.values()):
            self._fail(slot, "lost", detail, usable=False)
