"""The host's worker pool of one domain: a queue, worker processes, deadlines, and blame for a death.

A request's clock runs only while a worker runs it. A late worker is killed; its running request gets the verdict
`timeout`, the others return to the queue. A request that ran when its worker died is a suspect: it runs again, alone,
on a fresh worker, and gets the verdict `error` only if that one dies too. Nothing here blocks.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from spmd_rl.sidecar import wire
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.fair_queue import FairQueue
from spmd_rl.sidecar.frames import FrameSocket
from spmd_rl.sidecar.process_pool import ProcessPool, WorkerProcess
from spmd_rl.types import Verdict

CHUNK_SECONDS = 0.01
"""Seconds of work given to a `sync` worker at once: few frames, no long wait behind a slow request."""
NOTHING = msgspec.Raw(b"")
ASYNC_GRACE = 1.0
"""Time beyond its deadline until an `async` worker, which times its calls, is killed."""

_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class ScoreJob:
    """One request at the host; `client` and `id` name its owner."""

    client: bytes
    id: int
    domain: str
    timeout: float
    input: msgspec.Raw
    cancelled: bool = False
    number: int = field(default_factory=_numbers.__next__)
    """Id at the worker, unique in this process."""

    @property
    def request(self) -> wire.ScoreRequest:
        """The message to a worker."""
        return wire.ScoreRequest(self.number, self.domain, self.timeout, self.input)


@dataclass(eq=False, slots=True)
class _ScoreWorker(WorkerProcess):
    """`mode` is empty until it is ready."""

    mode: str = ""
    max_batch: int = wire.BATCH_ITEMS
    fresh: bool = True
    """True if it has run nothing and no worker has died since its start; deaths may have a common cause, such as
    memory.
    """
    alone: bool = False
    """True if it runs a suspect."""
    running: dict[int, ScoreJob] = field(default_factory=dict)
    """Jobs by number, in running order."""
    since: float = 0.0

    @property
    def capacity(self) -> int:
        """Requests that it can take; an `async` worker takes more while others run."""
        if self.mode == "async" and not self.alone:
            return wire.BATCH_ITEMS - len(self.running)
        return self.max_batch if self.mode and not self.running else 0


class Pool(ProcessPool[_ScoreWorker]):
    """Workers of one domain. The host calls `tick` in each round.

    resolve(job, verdict): called once per submitted job.
    """

    def __init__(
        self, domain: str, spec: wire.PoolSpec, resolve: Callable[[ScoreJob, Verdict], None], loop: EventLoop
    ) -> None:
        super().__init__(f"reward.{domain}", spec, wire.FROM_WORKER, loop)
        self.verdicts = 0
        self._resolve = resolve
        self._queue: FairQueue[ScoreJob] = FairQueue()
        self._suspects: deque[ScoreJob] = deque()
        self._mean_seconds = CHUNK_SECONDS

    @property
    def busy(self) -> bool:
        """True if a worker starts or runs, or a request waits."""
        waiting = self._queue or self._suspects or any(worker.running for worker in self.workers)
        return not self.ready or bool(waiting)

    def submit(self, job: ScoreJob) -> None:
        """Queue a job, or resolve it as `error` if the pool is broken."""
        if self.broken:
            self._settle(job, Verdict("error", detail=self.broken))
        else:
            self._queue.push(job.client, job)

    def cancel(self, job: ScoreJob) -> None:
        """Forget a cancelled job; its worker continues."""
        job.cancelled, job.input = True, NOTHING
        self._queue.discard(job.client, job)

    def status(self) -> wire.PoolStatus:
        """Return the state of the pool."""
        ready = sum(bool(worker.mode) for worker in self.workers)
        running = sum(len(worker.running) for worker in self.workers)
        queued = len(self._queue) + len(self._suspects)
        settled = (self.verdicts, self.deaths, self.broken)
        return wire.PoolStatus(self.spec.target, self.spec.workers, ready, running, queued, *settled)

    def tick(self) -> None:
        """Enforce deadlines, replace dead workers and hand out work."""
        for worker in [worker for worker in self.workers if self.loop.now > worker.deadline]:
            self._on_deadline(worker)
        self.start_workers(self.spec.workers)
        if not self.ready:
            # Counts as progress, or clients would give up a pool whose workers take long to start. The deadline limits
            # it.
            self.progress += 1
        if self._queue or self._suspects:
            self._dispatch()

    # -- workers --------------------------------------------------------------------------------------------------

    def _new_worker(self, frames: FrameSocket, deadline: float) -> _ScoreWorker:
        return _ScoreWorker(frames, deadline)

    def _on_message(self, worker: _ScoreWorker, message: wire.Ready | wire.ScoreReplies) -> None:
        if isinstance(message, wire.Ready):
            worker.mode, worker.max_batch = message.mode, message.max_batch
            return
        for item in message.items:
            self._on_verdict(worker, item)

    def _on_verdict(self, worker: _ScoreWorker, item: wire.ScoreReply) -> None:
        job = worker.running.pop(item.id, None)
        if job is None:
            return
        now = self.loop.now
        if worker.mode == "sync":
            self._mean_seconds += 0.1 * (max(now - worker.since, 1e-6) - self._mean_seconds)
            worker.since = now
        worker.alone = False
        self._set_deadline(worker)
        self._settle(job, item.verdict)

    # -- work -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        for worker in list(self.workers):
            if not worker.capacity:
                continue
            if self._suspects and worker.fresh:
                worker.alone = True
                self._give(worker, [self._suspects.popleft()])
            elif self._suspects and not any(other.fresh for other in self.workers):
                if not worker.running:
                    # The next tick starts a fresh worker in its place.
                    self.remove(worker)
            elif jobs := self._take_chunk(worker):
                self._give(worker, jobs)

    def _take_chunk(self, worker: _ScoreWorker) -> list[ScoreJob]:
        share = -(-len(self._queue) // len(self.workers))
        limit = int(CHUNK_SECONDS / self._mean_seconds) if worker.mode == "sync" else wire.BATCH_ITEMS
        limit = max(1, min(share, limit, worker.capacity))
        jobs, size = [], 0
        while self._queue and len(jobs) < limit and size < wire.BATCH_BYTES:
            job = self._queue.pop()
            if not job.cancelled:
                jobs.append(job)
                size += len(memoryview(job.input))
        return jobs

    def _give(self, worker: _ScoreWorker, jobs: list[ScoreJob]) -> None:
        worker.running |= {job.number: job for job in jobs}
        worker.fresh, worker.since = False, self.loop.now
        self._set_deadline(worker)
        self.send(worker, wire.ScoreRequests([job.request for job in jobs]))

    def _set_deadline(self, worker: _ScoreWorker) -> None:
        if not worker.running:
            worker.deadline = float("inf")
        elif worker.mode == "sync":
            worker.deadline = self.loop.now + next(iter(worker.running.values())).timeout
        else:
            grace = ASYNC_GRACE if worker.mode == "async" else 0.0
            worker.deadline = worker.since + max(job.timeout for job in worker.running.values()) + grace

    def _settle(self, job: ScoreJob, verdict: Verdict) -> None:
        self.progress += 1
        self._resolve(job, verdict)

    # -- failures -------------------------------------------------------------------------------------------------

    def _on_deadline(self, worker: _ScoreWorker) -> None:
        if not worker.ready:
            self.late_to_start(worker)
            return
        seconds = next(iter(worker.running.values())).timeout
        self.deaths += 1
        self.remove(worker)
        self._put_blame(worker, Verdict("timeout", detail=f"no verdict after {seconds:g} s"))

    def _on_death(self, worker: _ScoreWorker) -> None:
        self._put_blame(worker, Verdict("error", detail="it killed its worker, then a fresh one that ran it alone"))

    def _put_blame(self, worker: _ScoreWorker, verdict: Verdict) -> None:
        """Settle or requeue the jobs of a lost worker. verdict: of the job to blame, if certain."""
        jobs, alone = list(worker.running.values()), worker.alone
        num_running = 1 if worker.mode == "sync" else len(jobs)
        blamed, innocent = jobs[:num_running], jobs[num_running:]
        if alone or (verdict.status == "timeout" and len(blamed) == 1):
            for job in blamed:
                self._settle(job, verdict)
        else:
            self._suspects.extend(job for job in blamed if not job.cancelled)
            # The cause, such as a lack of memory, may have hit idle workers too, which show it only later. A suspect
            # must not run on one.
            for other in self.workers:
                other.fresh = False
        for job in reversed(innocent):
            self._queue.push(job.client, job, first=True)

    def _drop_work(self, reason: str) -> None:
        jobs = [job for worker in self.workers for job in worker.running.values()]
        jobs += [*self._suspects, *self._queue]
        self._suspects.clear()
        self._queue = FairQueue()
        for job in jobs:
            self._settle(job, Verdict("error", detail=reason))
