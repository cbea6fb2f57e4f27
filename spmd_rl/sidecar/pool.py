"""The workers of one domain, as the host sees them: a queue, processes, deadlines, and who is to blame for a death.

The rules. A question's clock runs only while a worker runs it. A worker past its deadline is killed; the question it
ran gets `timeout`, the others go back. A question that was being run when its worker died is a suspect: it runs again,
alone, on a fresh worker, and only if that dies too is it condemned (`error`). Nothing here blocks.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from spmd_rl import wire
from spmd_rl.sidecar.channel import FORK, Channel, send
from spmd_rl.types import Verdict

MAX_FAILURES = 3
"""So many workers in a row (beside one for each place) that never got ready condemn the pool."""
CHUNK_SECONDS = 0.01
"""Work handed to a worker at once, going by the mean so far: few frames, and no long wait behind a slow question."""
AHEAD_SECONDS = 0.1
"""Work that an attached node has under way for each worker, going by the mean: longer than a frame takes to and fro."""
ASYNC_GRACE = 1.0
"""An `async` worker keeps its own deadlines; it is killed only when its loop is stuck, so much later."""


@dataclass(eq=False, slots=True)
class Job:
    """One question at the host, from its arrival to its verdict."""

    client: bytes
    id: int
    domain: str
    timeout: float
    question: msgspec.Raw
    dropped: bool = False
    lost: int = 0
    """Attached nodes that were lost with it."""


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process; `pidfd` is -1 until it has said its pid, `style` empty until it is ready."""

    channel: Channel
    deadline: float
    pidfd: int = -1
    style: str = ""
    max_batch: int = wire.BATCH_ITEMS
    fresh: bool = True
    alone: bool = False
    """Runs a suspect."""
    running: dict[int, Job] = field(default_factory=dict)
    """By job number, in the order in which they run."""
    since: float = 0.0

    @property
    def room(self) -> int:
        """Questions that may be handed to it now. An `async` worker takes more while others are under way."""
        if self.style == "async" and not self.alone:
            return wire.BATCH_ITEMS - len(self.running)
        return self.max_batch if self.style and not self.running else 0

    def kill(self) -> None:
        """End the process, whatever it does, and forget it."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
            self.pidfd = -1
        self.channel.socket.close()


class Pool:
    """The workers of one domain. The host calls `tick` in every round of its loop, and `heed` when a socket wakes.

    Workers' sockets are registered at the host's selector with `(pool, worker)` as data. `resolve(job, verdict)` is
    called once for each submitted job.
    """

    def __init__(
        self,
        domain: str,
        spec: wire.Pool,
        resolve: Callable[[Job, msgspec.Raw], None],
        selector: selectors.BaseSelector,
    ) -> None:
        self.domain = domain
        self.broken = ""
        """Why no worker can be had, if so."""
        self.beats = 0
        self.verdicts = 0
        self.deaths = 0
        self._spec = spec
        self._resolve = resolve
        self._selector = selector
        self._queue: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._workers: list[Worker] = []
        self._zygote: subprocess.Popen | None = None
        self._line: socket.socket | None = None
        self._failures = 0
        self._why = ""
        self._was_ready = False
        self._not_before = 0.0
        self._next_number = 0
        self._mean_seconds = CHUNK_SECONDS

    @property
    def ready(self) -> bool:
        """Whether a worker has built the rewarder."""
        return any(worker.style for worker in self._workers)

    @property
    def busy(self) -> bool:
        """Whether deadlines run or workers are missing."""
        missing = len(self._workers) < self._spec.workers and not self.broken
        return missing or any(worker.running or not worker.style for worker in self._workers)

    @property
    def window(self) -> int:
        """Questions that these workers should have under way and at hand, where more of them are a way off."""
        styles = [worker.style for worker in self._workers if worker.style]
        if not styles or self.broken:
            return 0
        ahead = int(AHEAD_SECONDS / self._mean_seconds) if styles[0] == "each" else wire.BATCH_ITEMS
        if not self.verdicts:
            ahead = 0  # nobody knows yet how long one takes
        return min(wire.WINDOW, len(styles) * max(2, min(ahead, wire.BATCH_ITEMS)))

    def submit(self, job: Job) -> None:
        """Queue a question, or refuse it if no worker can be had."""
        if self.broken:
            self._settle(job, Verdict("error", detail=self.broken))
        else:
            self._queue.append(job)

    def take(self, limit: int) -> list[Job]:
        """The next questions: at most `limit`, and what a frame should hold."""
        jobs, size = [], 0
        while self._queue and len(jobs) < limit and size < wire.BATCH_BYTES:
            job = self._queue.popleft()
            if not job.dropped:
                jobs.append(job)
                size += len(memoryview(job.question))
        return jobs

    def put_back(self, jobs: list[Job], suspect: bool = False) -> None:
        """Questions that were taken, to be the next again; `suspect`: to run alone on fresh workers."""
        if self.broken:
            for job in jobs:
                self.submit(job)
        elif suspect:
            self._suspects.extend(jobs)
        else:
            self._queue.extendleft(reversed(jobs))

    def report(self) -> wire.PoolReport:
        """Where it stands."""
        ready = sum(bool(worker.style) for worker in self._workers)
        running = sum(len(worker.running) for worker in self._workers)
        queued = len(self._queue) + len(self._suspects)
        settled = (self.verdicts, self.deaths, self.broken)
        return wire.PoolReport(self._spec.target, self._spec.workers, ready, running, queued, *settled)

    def tick(self, now: float) -> None:
        """Enforce deadlines, replace the dead, hand out work. `now`: seconds of the host's own running time."""
        for worker in [worker for worker in self._workers if now > worker.deadline]:
            self._late(worker, now)
        if not self.broken and now >= self._not_before:
            while len(self._workers) < self._spec.workers:
                self._spawn(now)
        if not self.ready:
            self.beats += 1  # starting is progress; `deadline` bounds it
        if self._queue or self._suspects:
            self._dispatch(now)

    def heed(self, worker: Worker, now: float) -> None:
        """Take in what a worker has said, and its death; write what it can take."""
        if worker not in self._workers:
            return
        if worker.channel.stuck:
            worker.channel.flush()
            self._watch(worker)
        try:
            messages, gone = worker.channel.receive(wire.FROM_WORKER)
        except wire.WireError:
            messages, gone = [], True
        for message in messages:
            if isinstance(message, wire.Done):
                self._done(worker, message, now)
            elif isinstance(message, wire.Started):
                with contextlib.suppress(ProcessLookupError):
                    worker.pidfd = os.pidfd_open(message.pid)
            elif isinstance(message, wire.Ready):
                worker.style, worker.max_batch, worker.deadline = message.style, message.max_batch, float("inf")
                self._failures, self._was_ready = 0, True
                self.beats += 1
            elif isinstance(message, wire.Failed):
                self._why = message.detail
                if not self._was_ready:  # a user's mistake; later, perhaps a server that is down for a moment
                    self._break(message.detail)
        if gone and worker in self._workers:
            self._lost(worker, now, Verdict("error", detail="it killed its worker, then a fresh one that ran it alone"))

    def close(self) -> None:
        """Kill all processes of the pool."""
        for worker in list(self._workers):
            self._remove(worker)
        self._end_zygote()

    # -- work -----------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        for worker in list(self._workers):
            if not worker.room:
                continue
            if self._suspects and worker.fresh:
                self._give(worker, [self._suspects.popleft()], now)
                worker.alone = True
            elif self._suspects and not any(other.fresh for other in self._workers):
                if not worker.running:
                    self._remove(worker)  # its place is taken by a fresh one
            elif chunk := self._chunk(worker):
                self._give(worker, chunk, now)

    def _chunk(self, worker: Worker) -> list[Job]:
        share = -(-len(self._queue) // len(self._workers))
        limit = int(CHUNK_SECONDS / self._mean_seconds) if worker.style == "each" else wire.BATCH_ITEMS
        return self.take(max(1, min(share, limit, worker.room)))

    def _give(self, worker: Worker, jobs: list[Job], now: float) -> None:
        work = []
        for job in jobs:
            worker.running[self._next_number] = job
            work.append(wire.Job(self._next_number, job.timeout, job.question))
            self._next_number += 1
        worker.fresh, worker.since = False, now
        self._set_deadline(worker, now)
        worker.channel.send(wire.Work(work))
        if worker.channel.stuck:
            self._watch(worker)

    def _set_deadline(self, worker: Worker, now: float) -> None:
        if not worker.running:
            worker.deadline = float("inf")
        elif worker.style == "each":
            worker.deadline = now + next(iter(worker.running.values())).timeout
        else:
            grace = ASYNC_GRACE if worker.style == "async" else 0.0
            worker.deadline = worker.since + max(job.timeout for job in worker.running.values()) + grace

    def _done(self, worker: Worker, message: wire.Done, now: float) -> None:
        job = worker.running.pop(message.number, None)
        if job is None:
            return
        if worker.style == "each":
            self._mean_seconds += 0.1 * (max(now - worker.since, 1e-6) - self._mean_seconds)
            worker.since = now
        worker.alone = False
        self._set_deadline(worker, now)
        self.beats += 1
        self._resolve(job, message.verdict)

    # -- trouble --------------------------------------------------------------------------------------------------

    def _late(self, worker: Worker, now: float) -> None:
        if not worker.style:
            if self._was_ready:
                self._lost(worker, now, Verdict("error"))
            else:
                self._break(self._unsaid)
            return
        seconds = next(iter(worker.running.values())).timeout
        self._lost(worker, now, Verdict("timeout", detail=f"no verdict after {seconds:g} s"))

    def _lost(self, worker: Worker, now: float, verdict: Verdict) -> None:
        """A worker is dead or must die. `verdict` is for the question that is to blame, once that is certain."""
        jobs, alone = list(worker.running.values()), worker.alone
        self.deaths += 1
        self._remove(worker)
        if not worker.style:
            self._lost_at_start(now)
            return
        at_work = 1 if worker.style == "each" else len(jobs)
        blamed, innocent = jobs[:at_work], jobs[at_work:]
        if alone or (verdict.status == "timeout" and len(blamed) == 1):
            for job in blamed:
                self._settle(job, verdict)
        else:
            self._suspects.extend(job for job in blamed if not job.dropped)
            for other in self._workers:  # whatever killed this worker may have struck those that wait, unnoticed yet
                other.fresh = False
        self._queue.extendleft(reversed(innocent))

    def _lost_at_start(self, now: float) -> None:
        self._failures += 1
        self._not_before = now + 0.1 * self._failures
        if self._failures >= MAX_FAILURES + self._spec.workers:
            self._break(self._why or self._unsaid)

    @property
    def _unsaid(self) -> str:
        what = f"its worker dies, or takes over {self._spec.start_seconds:g} s, while it imports or builds the rewarder"
        return f"reward.{self.domain}.target: {self._spec.target}: {what}"

    def _break(self, why: str) -> None:
        self.broken = why
        for worker in list(self._workers):
            self._suspects.extend(worker.running.values())
            self._remove(worker)
        self._end_zygote()
        for job in [*self._suspects, *self._queue]:
            self._settle(job, Verdict("error", detail=why))
        self._suspects.clear()
        self._queue.clear()

    def _settle(self, job: Job, verdict: Verdict) -> None:
        self.beats += 1
        self._resolve(job, wire.pack(verdict))

    # -- processes ------------------------------------------------------------------------------------------------

    def _spawn(self, now: float) -> None:
        if self._zygote is None or self._zygote.poll() is not None:
            self._end_zygote()
            self._start_zygote()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead zygote: `ours` reads EOF
            socket.send_fds(self._line, [FORK], [theirs.fileno()])
        worker = Worker(Channel(ours), deadline=now + self._spec.start_seconds)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, (self, worker))

    def _start_zygote(self) -> None:
        self._line, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "spmd_rl.sidecar.zygote", str(theirs.fileno())]
        with theirs:
            self._zygote = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead already: so will be its workers
            send(self._line, wire.Warm(os.getpid(), self.domain, self._spec))

    def _end_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()
            self._line.close()
            self._zygote = self._line = None

    def _watch(self, worker: Worker) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.stuck else 0)
        self._selector.modify(worker.channel.socket, events, (self, worker))

    def _remove(self, worker: Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.channel.socket)
        worker.kill()
