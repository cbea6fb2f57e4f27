"""The sidecar host of a node: takes questions from the ranks, hands them to pools of workers, sends verdicts back.

One thread, one loop, no user code: a rewarder runs in a worker, so nothing it does can hold up or end the host. It
keeps no verdicts: a question that is sent again while it is under way is the same question, afterwards a new one.
"""

import contextlib
import os
import secrets
import selectors
import socket
import stat
import time
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import HostKeys, bound
from spmd_rl.errors import UserError
from spmd_rl.sidecar.channel import send
from spmd_rl.sidecar.gate import Gate
from spmd_rl.sidecar.nodes import Nodes
from spmd_rl.sidecar.pool import Job, Pool
from spmd_rl.sidecar.server import Server
from spmd_rl.types import Verdict

SWEEP_SECONDS = 0.02
"""Longest wait of the loop while a deadline runs."""
IDLE_SECONDS = 1.0
"""Longest wait otherwise."""
MAX_GAP = 0.25
"""A longer pause of the loop (a stopped process, an overloaded machine) counts as this much of a deadline."""
FRAMES_PER_ROUND = 64
SOCKET_FRAMES = 1_000
"""High-water mark of the socket in either direction for each peer, in frames."""
DRAIN_SECONDS = 10.0
"""For what is under way when this host is asked to end."""
LINGER_MS = 300
"""For the last frames of a host that drains, or has nodes to tell."""


class Host:
    """The loop. `parent` is the socket of the rank that started us: it hears `Ready` or `Failed` once, and when it
    closes, we end."""

    def __init__(self, start: wire.Start, parent: socket.socket) -> None:
        self._parent = parent
        self._address = start.address
        self._name = secrets.token_hex(8)
        self._told = False
        self._began = time.monotonic()
        self._drain_until: float | None = None
        self._jobs: dict[tuple[bytes, int], Job] = {}
        self._load: Counter[bytes] = Counter()
        self._bytes: Counter[bytes] = Counter()
        self._held_bytes = 0
        self._replies: defaultdict[bytes, list[wire.RawJudged]] = defaultdict(list)
        keys = HostKeys.load(start.keys) if start.keys else None
        self._context = zmq.Context()
        self._selector = selectors.DefaultSelector()
        self._gate = Gate(self._context, keys, self._selector) if keys else None
        self._router = _listen(self._context, start.address, keys)
        self._selector.register(self._router.FD, selectors.EVENT_READ, None)
        self._selector.register(parent, selectors.EVENT_READ, parent)
        self._servers = {name: Server(name, spec, self._selector) for name, spec in start.servers.items()}
        urls = {name: server.url for name, server in self._servers.items()}
        specs = {name: msgspec.structs.replace(spec, url=urls.get(name, "")) for name, spec in start.pools.items()}
        self._pools = {name: Pool(name, spec, self._resolve, self._selector) for name, spec in specs.items()}
        self._nodes = Nodes(self._name, self._pools, specs, self._send, self._resolve)
        self._seen = time.monotonic()
        self._now = 0.0

    def drain(self) -> None:
        """Take nothing more, and end once all that is under way is answered, or soon anyway: ranks ask the next host
        for the rest. May be called from a signal's handler."""
        if self._drain_until is None:
            self._drain_until = self._now + DRAIN_SECONDS

    def run(self) -> None:
        """Serve until the parent is gone, or a pool cannot be had at the start."""
        try:
            while self._round() and not self._drained():
                pass
        finally:
            linger = LINGER_MS if self._nodes or self._drain_until is not None else 0
            if self._drain_until is None:
                self._nodes.close()  # the run is over; else a host follows, whom they join
            for part in (*self._pools.values(), *self._servers.values()):
                part.close()
            self._context.destroy(linger=linger)
            clean(self._address)

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        return self._now > self._drain_until or not (self._jobs or self._replies)

    def _round(self) -> bool:
        awake = [key.data for key, _ in self._selector.select(self._patience()) if key.data is not None]
        now = time.monotonic()
        self._now += min(now - self._seen, MAX_GAP)
        self._seen = now
        if self._parent in awake:
            return False
        for part, worker in awake:
            part.heed(worker, self._now)
        self._take_in()
        for server in self._servers.values():
            server.tick(self._now)
        for name, pool in self._pools.items():
            if name in self._servers and not self._servers[name].ready:
                pool.beats += 1  # its questions wait, as long as `start_seconds` allows
            else:
                pool.tick(self._now)
        self._nodes.tick(self._now)
        self._send_replies()
        return self._report()

    def _patience(self) -> float:
        """Seconds the loop may wait. The ROUTER's descriptor tells of changes only, so its state is asked for first."""
        if self._router.EVENTS & zmq.POLLIN:
            return 0.0
        if self._replies or any(pool.busy for pool in self._pools.values()):
            return SWEEP_SECONDS
        return MAX_GAP if self._nodes else IDLE_SECONDS

    def _take_in(self) -> None:
        for _ in range(FRAMES_PER_ROUND):
            try:
                client, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._understand(client, wire.TO_HOST.decode(b"".join(frames)))
            except wire.WireError as error:
                self._send(client, wire.Error(str(error)))

    def _understand(self, client: bytes, message: msgspec.Struct) -> None:
        if isinstance(message, wire.Scores):
            for item in message.items:
                self._score(client, item)
        elif isinstance(message, wire.Drop):
            for id_ in message.ids:
                if job := self._forget(client, id_):
                    job.dropped = True
        elif isinstance(message, wire.Ping):
            self._send(client, wire.Pong(self._name, {name: pool.beats for name, pool in self._pools.items()}))
        elif isinstance(message, wire.Ask):
            self._send(client, self._status())
        elif self._gate is None:
            raise wire.WireError("nodes attach only to a host with sidecar.keys")
        else:
            self._nodes.heed(client, message, self._now)

    def _score(self, client: bytes, item: wire.Score) -> None:
        if (client, item.id) in self._jobs:
            return  # sent again
        if self._drain_until is not None:
            return  # asked again, when the next host is there
        num_bytes = len(memoryview(item.question))
        if self._load[client] + len(self._replies.get(client, ())) >= 2 * wire.WINDOW:
            raise wire.WireError(f"more than {2 * wire.WINDOW} questions under way")
        if self._bytes[client] + num_bytes > 2 * wire.WINDOW_BYTES or self._held_bytes + num_bytes > wire.HELD_BYTES:
            raise wire.WireError(f"more than {2 * wire.WINDOW_BYTES} bytes of questions under way, or too many in all")
        wire.QUESTION.unpack(item.question)
        job = Job(client, item.id, item.domain, item.timeout, item.question)
        self._jobs[client, item.id] = job
        self._load[client] += 1
        self._bytes[client] += num_bytes
        self._held_bytes += num_bytes
        if pool := self._pools.get(item.domain):
            pool.submit(job)
        else:
            self._resolve(job, wire.pack(Verdict("error", detail=f"this host has no reward.{item.domain}")))

    def _forget(self, client: bytes, id_: int) -> Job | None:
        job = self._jobs.pop((client, id_), None)
        if job is not None:
            num_bytes = len(memoryview(job.question))
            self._load[client] -= 1
            self._bytes[client] -= num_bytes
            self._held_bytes -= num_bytes
            if not self._load[client]:
                del self._load[client], self._bytes[client]
        return job

    def _resolve(self, job: Job, verdict: msgspec.Raw) -> None:
        if not job.dropped:
            self._forget(job.client, job.id)
            self._replies[job.client].append(wire.RawJudged(job.id, verdict))
            if pool := self._pools.get(job.domain):
                pool.verdicts += 1

    def _status(self) -> wire.Report:
        return wire.Report(
            self._name,
            os.getpid(),
            time.monotonic() - self._began,
            len(self._load),
            len(self._jobs),
            self._held_bytes,
            self._gate.refused if self._gate else 0,
            self._drain_until is not None,
            {name: pool.report() for name, pool in self._pools.items()},
            self._nodes.report(self._now),
        )

    def _send_replies(self) -> None:
        waiting, self._replies = self._replies, defaultdict(list)
        for client, items in waiting.items():
            for begin in range(0, len(items), wire.BATCH_ITEMS):
                batch = items[begin : begin + wire.BATCH_ITEMS]
                if not self._send(client, wire.RawVerdicts(batch)):
                    self._replies[client] += batch  # its pipe is full

    def _send(self, client: bytes, message: msgspec.Struct) -> bool:
        """Whether the frame is on its way, or nobody is there to have it."""
        try:
            self._router.send_multipart((client, wire.encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._nodes.lose(client)
        return True

    def _report(self) -> bool:
        """Tell the parent, once, how the start went; False if it failed."""
        if not self._told:
            broken = [part.broken for part in (*self._pools.values(), *self._servers.values()) if part.broken]
            if broken or all(pool.ready for pool in self._pools.values()):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    send(self._parent, wire.Failed(broken[0]) if broken else wire.Ready())
                self._told = True
                return not broken
        return True


def _listen(context: zmq.Context, address: str, keys: HostKeys | None) -> zmq.Socket:
    """A bound ROUTER. UserError if the address is taken or its directory is not ours alone."""
    if path := socket_path(address):
        claim_directory(path.parent)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, SOCKET_FRAMES)
    router.setsockopt(zmq.RCVHWM, SOCKET_FRAMES)
    router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that connects anew is the same client
    bound(router, address)
    if keys is not None:
        keys.secure(router)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise UserError(f"the sidecar cannot listen on {address}: {error}") from None
    return router


def socket_path(address: str) -> Path | None:
    """The socket's path, if the address has one."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def claim_directory(path: Path) -> None:
    """Make a directory that only we can enter. UserError if there is one that others own or can enter."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(f"the sidecar's directory {path} must be a directory of your own with mode 0700")


def clean(address: str) -> None:
    """Remove the socket of a host that is gone, and its directory if nothing else is in it."""
    if path := socket_path(address):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()
