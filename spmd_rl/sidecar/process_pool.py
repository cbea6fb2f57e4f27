"""`ProcessPool`: worker processes of one plug-in, forked on demand, watched and replaced. Nothing here blocks.

`Pool` (scores) and `EnvPool` (sessions) define the work. A pool gives up if its first workers fail to start; later
failures are retried, and only many in a row break it.
"""

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from spmd_rl.base.errors import tell
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.frames import FORK, FrameSocket, start_child

MAX_FAILURES = 3
"""Consecutive failed starts, plus one per worker, that break a pool."""
MAX_STARTING = 16
"""Concurrent starts; each occupies the fork server for a moment."""
STOP_SECONDS = 2.0
"""Time for a fork server to end its workers."""
RETRY_SECONDS = 0.5
"""Pause after a start that lacked descriptors, memory or processes."""


@dataclass(eq=False, repr=False, slots=True)
class WorkerProcess:
    """One worker process; `pidfd` is -1 until it has sent its pid."""

    frames: FrameSocket
    deadline: float
    """Limit of its start, then of its work."""
    pidfd: int = -1
    ready: bool = False
    """True once it has built its plug-in."""
    ending: bool = False
    """True if it was asked to end."""

    def kill(self) -> None:
        """End the process and close its socket."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
            self.pidfd = -1
        self.frames.socket.close()


W = TypeVar("W", bound=WorkerProcess)


class ProcessPool(Generic[W]):
    """Base of pools. A subclass creates workers and handles their messages, loss and end."""

    def __init__(
        self, section: str, spec: wire.PoolSpec | wire.EnvPoolSpec, codec: wire.Codec, loop: EventLoop
    ) -> None:
        """section: name of the pool's settings. codec: of its workers' messages."""
        self.section = section
        self.broken = ""
        """Reason why no worker can start; empty if one can."""
        self.progress = 0
        self.spec = spec
        self.loop = loop
        self.deaths = 0
        self.workers: list[W] = []
        self._codec, self._digest = codec, spec_digest(spec)
        self._forkserver: subprocess.Popen | None = None
        self._forkserver_socket: socket.socket | None = None
        self._failures = 0
        self._failure = ""
        self._was_ready = False
        self._is_short = False
        self._not_before = 0.0

    @property
    def ready(self) -> bool:
        """True if a worker is ready."""
        return any(worker.ready for worker in self.workers)

    def pulse(self) -> wire.PoolPulse:
        """Return the pool's report for clients."""
        slots = self.spec.slots if isinstance(self.spec, wire.EnvPoolSpec) else 1
        return wire.PoolPulse(self.progress, 0 if self.broken else self.spec.workers * slots, self._digest)

    def close(self) -> None:
        """End all workers."""
        for worker in list(self.workers):
            self.remove(worker)
        self._end_forkserver()

    # -- what a subclass defines ----------------------------------------------------------------------------------

    def _new_worker(self, frames: FrameSocket, deadline: float) -> W:
        raise NotImplementedError

    def _on_message(self, worker: W, message: msgspec.Struct) -> None:
        """Handle a message other than `Started` and `StartFailed`; also `Ready`."""
        raise NotImplementedError

    def _on_death(self, worker: W) -> None:
        raise NotImplementedError

    def _drop_work(self, reason: str) -> None:
        raise NotImplementedError

    # -- workers --------------------------------------------------------------------------------------------------

    def start_workers(self, wanted: int) -> None:
        """Start workers up to a number, unless resources are short."""
        if self.broken or self.loop.now < self._not_before:
            return
        starting = sum(not worker.ready for worker in self.workers)
        try:
            while len(self.workers) < wanted and starting < MAX_STARTING:
                self._start_worker()
                starting += 1
        except OSError as error:
            self._not_before = self.loop.now + RETRY_SECONDS
            self._say_short(error)

    def _start_worker(self) -> None:
        if self._forkserver is None or self._forkserver.poll() is not None:
            self._end_forkserver()
            message = wire.StartForkServer(self.section, self.spec)
            self._forkserver, self._forkserver_socket = start_child("spmd_rl.sidecar.forkserver", message)
        ours, theirs = socket.socketpair()
        with (
            theirs,
            contextlib.suppress(BrokenPipeError, ConnectionResetError),
        ):  # if dead, `ours` reads as closed
            socket.send_fds(self._forkserver_socket, [FORK], [theirs.fileno()])
        worker = self._new_worker(FrameSocket(ours), self.loop.now + self.spec.start_seconds)
        self.workers.append(worker)
        self._watch(worker)

    def send(self, worker: W, message: msgspec.Struct) -> None:
        """Send a message to a worker, once it can take it."""
        worker.frames.send(message)
        if worker.frames.has_unsent:
            self._watch(worker)

    def _on_socket(self, worker: W) -> None:
        if worker.frames.has_unsent:
            worker.frames.flush()
            self._watch(worker)
        try:
            messages, gone = worker.frames.receive(self._codec)
        except wire.WireError:
            messages, gone = [], True
        for message in messages:
            if worker not in self.workers:
                return
            self._on_any(worker, message)
        if gone and worker in self.workers:
            self._lose(worker)

    def _on_any(self, worker: W, message: Any) -> None:
        if isinstance(message, wire.Started):
            try:
                worker.pidfd = os.pidfd_open(message.pid)
            except ProcessLookupError:
                pass  # dead already
            except OSError as error:
                self._say_short(error)
                self._not_before = self.loop.now + RETRY_SECONDS
                # Without a pidfd its death would go unnoticed. Closing the socket ends it before it works.
                self.remove(worker)
        elif isinstance(message, wire.StartFailed):
            self._failure = message.detail
            if not self._was_ready:
                # Before the first success this is a user's mistake; later, perhaps a server that is briefly down.
                self._give_up(message.detail)
        else:
            if isinstance(message, wire.Ready):
                worker.ready, worker.deadline = True, float("inf")
                self._was_ready, self._is_short = True, False
                self._failures = 0
                self.progress += 1
            self._on_message(worker, message)

    def _lose(self, worker: W) -> None:
        self.deaths += not worker.ending
        self.remove(worker)
        if worker.ready:
            self._on_death(worker)
            return
        self._failures += 1
        self._not_before = self.loop.now + 0.1 * self._failures
        if self._failures >= MAX_FAILURES + self.spec.workers:
            self._give_up(self._failure or self._no_worker)

    def late_to_start(self, worker: W) -> None:
        """Handle a worker that exceeds `start_seconds`."""
        if self._was_ready:
            self._lose(worker)
        else:
            self._give_up(self._no_worker)

    @property
    def _no_worker(self) -> str:
        what = f"its worker dies, or takes over {self.spec.start_seconds:g} s, while it imports or builds the target"
        return f"{self.section}.target: {self.spec.target}: {what}"

    def _give_up(self, reason: str) -> None:
        self.broken = reason
        self._drop_work(reason)
        self.close()

    def _say_short(self, error: OSError) -> None:
        if not self._is_short:
            tell(f"sidecar: {self.section}: no worker can start: {error.strerror}; retrying")
        self._is_short = True

    def _end_forkserver(self) -> None:
        if self._forkserver is not None:
            # The keeper kills the fork server and all processes of its workers when this socket closes.
            self._forkserver_socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._forkserver.wait(STOP_SECONDS)
            self._forkserver.kill()
            self._forkserver.wait()
            self._forkserver = self._forkserver_socket = None

    def _watch(self, worker: W) -> None:
        self.loop.watch(worker.frames.socket, lambda: self._on_socket(worker), write=worker.frames.has_unsent)

    def remove(self, worker: W) -> None:
        """Kill and forget a worker; the caller handles its work."""
        self.workers.remove(worker)
        self.loop.unwatch(worker.frames.socket)
        worker.kill()


def spec_digest(spec: wire.PoolSpec | wire.EnvPoolSpec) -> str:
    """Return a digest of the settings that decide a pool's results."""
    parts = [spec.target, spec.args, spec.packages]
    if isinstance(spec, wire.EnvPoolSpec):
        parts += [spec.eval_args, spec.reset_timeout, spec.step_timeout]
    return hashlib.sha256(msgspec.msgpack.encode(parts, order="deterministic")).hexdigest()[:16]
