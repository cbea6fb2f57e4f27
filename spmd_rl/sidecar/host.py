"""The sidecar host of a node: passes calls of ranks (answers to judge, resets and steps) to workers, and replies back.

One thread, one event loop and no user code, so that no rewarder can stop the host. Ranks start their node's host; on
machines without ranks it is started by hand.
"""

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field

import msgspec
import zmq

from spmd_rl.base.curve_keys import HostKeys
from spmd_rl.base.errors import UserError, tell
from spmd_rl.base.process import raise_open_files
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.env_pool import EnvPool
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.frames import send_frame
from spmd_rl.sidecar.pool import Pool, ScoreJob
from spmd_rl.sidecar.reward_server import RewardServer
from spmd_rl.sidecar.sessions import Sessions
from spmd_rl.sidecar.sockets import Authenticator, open_router, received, remove_socket
from spmd_rl.types import Verdict

DRAIN_SECONDS = 10.0
"""Time for requests in flight when the host should end."""
MAX_UNSENT = 1_000
"""Messages that may wait for one peer."""
LINGER_MS = 200


@dataclass(slots=True)
class _ClientJobs:
    jobs: dict[int, ScoreJob] = field(default_factory=dict)
    replies: list[wire.ScoreReply] = field(default_factory=list)


class Host:
    """The host's event loop. parent: socket to the rank that started it, for `Ready` or `StartFailed`; None if started
    by hand.
    """

    def __init__(self, start: wire.StartHost, parent: socket.socket | None) -> None:
        """UserError if the host cannot listen or a key is malformed."""
        self._parent = parent
        self._address = start.address
        self._started = time.monotonic()
        self._reported = False
        self._ended = False
        self._drain_until: float | None = None
        self._clients: dict[bytes, _ClientJobs] = {}
        keys = HostKeys.load(start.keys) if start.keys else None
        self._context = zmq.Context()
        self._loop = EventLoop()
        self._authenticator = Authenticator(self._context, keys, self._loop) if keys else None
        raise_open_files()
        try:
            self._router, _ = open_router(self._context, keys, start.address, wire.MAX_FRAME_BYTES, MAX_UNSENT)
        except UserError:
            self._context.destroy(linger=0)
            raise
        self._loop.watch(self._router, self._receive)
        if parent is not None:
            self._loop.watch(parent, self._end)
        self._servers = {name: RewardServer(name, spec, self._loop) for name, spec in start.servers.items()}
        urls = {name: server.url for name, server in self._servers.items()}
        specs = {name: msgspec.structs.replace(spec, url=urls.get(name, "")) for name, spec in start.pools.items()}
        self._pools = {name: Pool(name, spec, self._resolve, self._loop) for name, spec in specs.items()}
        self._env_pools = {tag: EnvPool(tag, spec, self._loop) for tag, spec in start.envs.items()}
        self._sessions = Sessions(self._env_pools, self._send, self._loop)

    def drain(self) -> None:
        """Refuse new requests, which ranks send to the next host, and end once those in flight are answered or after
        `DRAIN_SECONDS`. Signal handlers may call this.
        """
        if not self._draining:
            self._drain_until = self._loop.now + DRAIN_SECONDS

    def run(self) -> None:
        """Serve until the parent is gone, a drain is over, or a pool fails to start: UserError without a parent."""
        try:
            while not self._ended and not self._drained():
                unsent = any(client.replies for client in self._clients.values())
                busy = unsent or self._sessions.busy or any(pool.busy for pool in self._pools.values())
                self._loop.run_once(busy)
                self._tick()
        finally:
            for part in (*self._pools.values(), *self._env_pools.values(), *self._servers.values()):
                part.close()
            self._context.destroy(linger=LINGER_MS)
            remove_socket(self._address)

    @property
    def _draining(self) -> bool:
        return self._drain_until is not None

    def _drained(self) -> bool:
        return self._draining and (self._loop.now > self._drain_until or not (self._clients or self._sessions))

    def _end(self) -> None:
        self._ended = True

    def _tick(self) -> None:
        for server in self._servers.values():
            server.tick()
        for name, pool in self._pools.items():
            if name in self._servers and not self._servers[name].ready:
                # Counts as progress, so that clients wait for the server as long as `start_seconds` allows.
                pool.progress += 1
            else:
                pool.tick()
        self._sessions.tick()
        self._send_replies()
        if not self._reported:
            self._report_start()

    def _report_start(self) -> None:
        pools = (*self._pools.values(), *self._env_pools.values())
        broken = [part.broken for part in (*pools, *self._servers.values()) if part.broken]
        if not broken and not all(pool.ready for pool in pools):
            return
        self._reported, self._ended = True, self._ended or bool(broken)
        if self._parent is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                send_frame(self._parent, wire.StartFailed(broken[0]) if broken else wire.Ready())
        elif broken:
            raise UserError(broken[0])
        else:
            tell(f"sidecar: serving {', '.join(pool.section for pool in pools)} at {self._address}")

    # -- messages -------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for peer, *parts in received(self._router):
            self._sessions.on_any(peer)
            try:
                self._on_message(peer, wire.TO_HOST.decode(b"".join(parts)))
            except wire.WireError as error:
                self._send(peer, wire.Error(str(error)))

    def _on_message(self, peer: bytes, message: msgspec.Struct) -> None:
        if isinstance(message, wire.ScoreRequests):
            for item in message.items:
                self._on_request(peer, item)
        elif isinstance(message, wire.CancelScores):
            for id_ in message.ids:
                if job := self._forget(peer, id_):
                    self._pools[job.domain].cancel(job)
        elif isinstance(message, wire.SessionRequests):
            self._sessions.on_requests(peer, message, self._draining)
        elif isinstance(message, wire.Ping):
            pools = self._pools | {pool.section: pool for pool in self._env_pools.values()}
            self._send(
                peer, wire.Pong({name: pool.pulse() for name, pool in pools.items()} if not self._draining else {})
            )
        else:
            self._send(peer, self._status())

    def _on_request(self, peer: bytes, item: wire.ScoreRequest) -> None:
        if self._draining:
            # Unanswered on purpose: once this host is gone, the client sends the request to another.
            return
        client = self._clients.setdefault(peer, _ClientJobs())
        if item.id in client.jobs:
            raise wire.WireError(f"request {item.id} is in flight")
        # A copy: the rest of its frame is not kept.
        job = ScoreJob(peer, item.id, item.domain, item.timeout, item.input.copy())
        client.jobs[item.id] = job
        if pool := self._pools.get(item.domain):
            pool.submit(job)
        else:
            self._resolve(job, Verdict("error", detail=f"this host has no reward.{item.domain}"))

    def _forget(self, peer: bytes, id_: int) -> ScoreJob | None:
        client = self._clients.get(peer)
        job = client.jobs.pop(id_, None) if client else None
        if job is not None and not client.jobs and not client.replies:
            del self._clients[peer]
        return job

    def _resolve(self, job: ScoreJob, verdict: Verdict) -> None:
        if not job.cancelled:
            client = self._clients[job.client]
            client.replies.append(wire.ScoreReply(job.id, verdict))
            self._forget(job.client, job.id)
            job.cancelled = True
            if pool := self._pools.get(job.domain):
                pool.verdicts += 1

    def _send_replies(self) -> None:
        for peer, client in list(self._clients.items()):
            while client.replies and self._send(peer, wire.ScoreReplies(client.replies[: wire.BATCH_ITEMS])):
                del client.replies[: wire.BATCH_ITEMS]
            if not client.jobs and not client.replies:
                del self._clients[peer]

    def _send(self, peer: bytes, message: msgspec.Struct) -> bool:
        """Return False if the peer does not read; True if the frame is sent or the peer is gone."""
        try:
            self._router.send_multipart((peer, wire.encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._sessions.unreachable(peer)
        return True

    def _status(self) -> wire.HostStatus:
        return wire.HostStatus(
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - self._started,
            clients=len(self._clients),
            in_flight=sum(len(client.jobs) for client in self._clients.values()),
            unsent_replies=sum(len(client.replies) for client in self._clients.values()),
            refused_keys=self._authenticator.refused if self._authenticator else 0,
            draining=self._draining,
            pools={name: pool.status() for name, pool in self._pools.items()},
            envs={tag: pool.status() for tag, pool in self._env_pools.items()},
        )
