"""The worker pool of one environment, as the host sees it: a queue of resets, workers with slots, deadlines.

The rules. A session keeps the slot that its reset was given. The clock of a call runs while its worker has it. With one
slot, a worker past a deadline is killed. With several, the call fails alone: its thread is abandoned, and the worker
gets no more episodes and is ended after those that it has; but one that does not even answer a `Ping` is stuck as a
whole and is killed. A worker that dies takes its sessions with it: they are lost. Nothing here blocks.
"""

import contextlib
import socket
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from spmd_rl import wire
from spmd_rl.sidecar.crew import Crew, WorkerProcess
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.fair_queue import FairQueue
from spmd_rl.sidecar.frames import FrameSocket
from spmd_rl.types import LostReason

CHECK_SECONDS = 0.02
"""The pause between two looks at deadlines."""
PING_SECONDS = 2.0
"""A worker with a thread past its deadline must answer within this time, or is stuck as a whole."""
END_SECONDS = 2.0
"""The time that a worker without sessions, and with no more to come, may take to close its environments."""


class Holder(Protocol):
    """What a pool asks of a session, and tells it."""

    reset: wire.ResetRequest
    """What it asks for; `session` is its own affair."""
    client: Hashable
    """Whose it is: clients that wait get their slots in turn."""

    def on_seat(self, seat: "Seat") -> None:
        """Its reset begins."""
        ...

    def on_reply(self, number: int, reply: msgspec.Raw) -> None:
        """A call is answered."""
        ...

    def on_failure(self, reason: LostReason, detail: str, traceback: str = "") -> None:
        """The session is over, and its slot is no longer its own."""
        ...


@dataclass(eq=False, repr=False, slots=True)
class Seat:
    """A slot of a worker, with the session that has it."""

    worker: "_Worker"
    slot: int
    holder: Holder | None
    """None once the session is closed while a call still runs."""
    number: int = 0
    """Of the call that runs, or ran last."""
    deadline: float = float("inf")
    """When the call that runs is late; infinite if none runs."""


@dataclass(eq=False, repr=False, slots=True)
class _Worker(WorkerProcess):
    free: list[int] = field(default_factory=list)
    seats: dict[int, Seat] = field(default_factory=dict)
    """By slot."""
    episodes: int = 0
    retiring: bool = False
    """Whether it gets no more episodes."""
    stuck: bool = False
    """Whether a thread of it has been abandoned."""


class EnvPool(Crew[_Worker]):
    """The workers of one environment. The host calls `tick` in every round of its event loop."""

    def __init__(self, tag: str, spec: wire.EnvPoolSpec, loop: EventLoop) -> None:
        super().__init__(f"env.{tag}", spec, wire.FROM_ENV_WORKER, loop)
        self._queue: FairQueue[Holder] = FairQueue()
        self._num_seats = 0
        self._num_running = 0
        self._replies = 0
        self._next_check = 0.0
        self._may_dispatch = False

    @property
    def busy(self) -> bool:
        """Whether a worker is starting, a call runs or a reset waits."""
        return not self.ready or bool(self._queue or self._num_running)

    @property
    def spec(self) -> wire.EnvPoolSpec:
        """What the workers run."""
        return self._spec

    def submit(self, holder: Holder) -> None:
        """Queue a reset. Its holder hears `on_seat` and then `on_reply`, or `on_failure`."""
        if self.broken:
            holder.on_failure("error", self.broken)
        else:
            self._queue.push(holder.client, holder)
            self._may_dispatch = True

    def withdraw(self, holder: Holder) -> None:
        """Take a reset off the queue, if it waits there."""
        self._queue.discard(holder.client, holder)

    def step(self, seat: Seat, number: int, action: str) -> None:
        """Give a step to the worker that has the session."""
        self._give(seat, wire.StepRequest(seat.slot, number, action), number, self._spec.step_timeout)

    def release(self, seat: Seat) -> None:
        """Take the seat of a session that is over. A call that still runs keeps its slot, and its deadline."""
        seat.holder = None
        if seat.deadline == float("inf"):
            self._free(seat)

    def expire(self, seat: Seat) -> None:
        """Let the call that runs be late at once."""
        seat.deadline = min(seat.deadline, self._loop.now)

    def tick(self) -> None:
        """Enforce deadlines, replace workers and hand out resets."""
        if self._loop.now >= self._next_check:
            self._next_check = self._loop.now + CHECK_SECONDS
            self._check_deadlines()
            self._start_wanted()
            if not self.ready:
                self.progress += 1  # starting is progress; the worker's deadline limits it
        if self._queue and self._may_dispatch:
            self._may_dispatch = False
            self._dispatch()

    def status(self) -> wire.PoolStatus:
        """Return the state of the pool."""
        ready = sum(worker.ready for worker in self._workers)
        counts = (self._spec.workers, ready, self._num_seats, len(self._queue), self._replies, self._deaths)
        return wire.PoolStatus(self._spec.target, *counts, self.broken)

    # -- workers --------------------------------------------------------------------------------------------------

    def _start_wanted(self) -> None:
        """Start a worker for each session, as far as there may be so many."""
        if not self.broken:
            fit = sum(not worker.retiring for worker in self._workers)
            wanted = min(self._spec.workers, max(1, self._num_seats + len(self._queue)))
            most = 2 * self._spec.workers  # with those that retire
            self._start_workers(min(len(self._workers) + max(0, wanted - fit), most))

    def _new_worker(self, frames: FrameSocket, deadline: float) -> _Worker:
        return _Worker(frames, deadline, free=list(range(self._spec.slots))[::-1])

    def _on_message(
        self, worker: _Worker, message: wire.Ready | wire.SessionReplies | wire.Pong | wire.Goodbye
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

    def _on_outcome(self, worker: _Worker, item: wire.SessionReply | wire.SessionFailure) -> None:
        seat = worker.seats.get(item.session)
        if seat is None or seat.deadline == float("inf"):
            return
        self._replies += 1
        self.progress += 1
        self._num_running -= 1
        seat.deadline = float("inf")
        if seat.holder is None:
            self._free(seat)
        elif isinstance(item, wire.SessionReply):
            seat.holder.on_reply(item.number, item.reply)
        else:
            self._fail(seat, item.reason, item.detail, item.traceback)

    def _on_death(self, worker: _Worker) -> None:
        self._empty(worker, "its worker died")

    def _drop_work(self, reason: str) -> None:
        waiting, self._queue = self._queue, FairQueue()
        for worker in list(self._workers):
            self._empty(worker, reason)
        for holder in waiting:
            holder.on_failure("error", reason)

    # -- sessions -------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give resets to the workers that have the fewest sessions."""
        while self._queue:
            open_workers = [worker for worker in self._workers if worker.ready and worker.free and not worker.retiring]
            if not open_workers:
                return
            least = min(len(worker.seats) for worker in open_workers)
            for worker in open_workers:
                if self._queue and len(worker.seats) == least:
                    self._seat(worker, self._queue.pop())

    def _seat(self, worker: _Worker, holder: Holder) -> None:
        slot = worker.free.pop()
        seat = worker.seats[slot] = Seat(worker, slot, holder)
        self._num_seats += 1
        worker.episodes += 1
        if self._spec.recycle_after and worker.episodes >= self._spec.recycle_after:
            worker.retiring = True
        holder.on_seat(seat)
        self._give(seat, msgspec.structs.replace(holder.reset, session=slot), 0, self._spec.reset_timeout)

    def _give(self, seat: Seat, request: wire.ResetRequest | wire.StepRequest, number: int, seconds: float) -> None:
        seat.number, seat.deadline = number, self._loop.now + seconds
        self._num_running += 1
        self._send(seat.worker, wire.SessionRequests([request]))

    def _fail(self, seat: Seat, reason: LostReason, detail: str, traceback: str = "", usable: bool = True) -> None:
        """End a session. Without `usable`, its slot is never given again."""
        holder, seat.holder = seat.holder, None
        self._free(seat, usable)
        if holder is not None:
            holder.on_failure(reason, detail, traceback)

    def _free(self, seat: Seat, usable: bool = True) -> None:
        worker = seat.worker
        if worker.seats.pop(seat.slot, None) is None:
            return
        self.progress += 1
        self._num_seats -= 1
        if seat.deadline < float("inf"):
            self._num_running -= 1
            seat.deadline = float("inf")
        self._may_dispatch = True
        if usable:
            worker.free.append(seat.slot)
        if worker.retiring and not worker.seats:
            self._end(worker)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _check_deadlines(self) -> None:
        now = self._loop.now
        for worker in [worker for worker in self._workers if now > worker.deadline]:
            if worker.ready:
                self._deaths += not worker.ending
                self._remove(worker)
                self._empty(worker, "its worker hangs, and was killed")
            else:
                self._late_to_start(worker)
        if self._num_running:
            late = [seat for worker in self._workers for seat in worker.seats.values() if now > seat.deadline]
            for seat in late:
                self._on_late(seat)

    def _on_late(self, seat: Seat) -> None:
        worker = seat.worker
        verb, seconds = ("step", self._spec.step_timeout) if seat.number else ("reset", self._spec.reset_timeout)
        detail = f"its {verb} took over {seconds:g} s"
        worker.retiring = worker.stuck = True
        if len(worker.seats) > 1 and worker.deadline == float("inf"):
            worker.deadline = self._loop.now + PING_SECONDS
            self._send(worker, wire.Ping())
        self._fail(seat, "timeout", detail, usable=False)

    def _retire(self, worker: _Worker) -> None:
        worker.retiring = True
        if not worker.seats:
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        """End a worker without sessions. One that works can close its environments, until its deadline."""
        if worker.stuck:
            self._deaths += 1
            self._remove(worker)
        else:
            worker.ending, worker.deadline = True, self._loop.now + END_SECONDS
            with contextlib.suppress(OSError):
                worker.frames.socket.shutdown(socket.SHUT_WR)

    def _empty(self, worker: _Worker, detail: str) -> None:
        """Fail all sessions of a worker that is gone."""
        worker.retiring = False  # it needs no end
        for seat in list(worker.seats.values()):
            self._fail(seat, "lost", detail, usable=False)
