"""A worker node: a machine without ranks whose workers judge what a host elsewhere has too much of.

    python -m spmd_rl sidecar --connect tcp://HOST:PORT --keys DIR --allow math=rewards.math_verify:MathReward

The host sends which rewarder a domain has and with which arguments; the command line lists the classes that may be
imported here, how many workers there are and which sandbox they use. Pools and deadlines are those of a host
(`pool.py`). A node keeps nothing: what it had when it is lost, the host gives to others (`remote_nodes.py`).
"""

import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys
from spmd_rl.errors import UserError, tell
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.pool import Pool, ScoreJob
from spmd_rl.sidecar.sockets import open_dealer, received, send
from spmd_rl.types import Verdict

HEARTBEAT_SECONDS = 0.5
JOIN_SECONDS = 600.0
"""The time within which a host must answer first: it may start later than the node."""
WARN_SECONDS = 10.0
"""The time after which the node prints that it waits for a host."""
SILENCE_SECONDS = 60.0
"""A host that was there and is silent for this long is not coming back; the run is over."""
DRAIN_SECONDS = 10.0
"""The time for running requests when the node is asked to end."""
LINGER_MS = 500
_TARGET = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


class AllowList:
    """The classes that may be imported: `DOMAIN=MODULE:CLASS[,MODULE:CLASS...]`, the target, then those in `args`."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._targets: dict[str, list[str]] = {}
        for line in lines:
            domain, _, targets = line.partition("=")
            self._targets[domain] = targets.split(",")
            if not domain or not all(map(_TARGET.fullmatch, self._targets[domain])):
                raise UserError(f"--allow: must be DOMAIN=MODULE:CLASS, not {line!r}")

    @property
    def domains(self) -> list[str]:
        """All domains that are named."""
        return list(self._targets)

    def check(self, domain: str, spec: wire.PoolSpec) -> None:
        """UserError for a class that the host wants and that is not allowed, wherever in the arguments it is named."""
        known = self._targets.get(domain, [])
        if known[:1] != [spec.target]:
            raise UserError(f"--allow: the host's reward.{domain}.target is {spec.target}, not {', '.join(known[:1])}")
        for text in _strings(spec.args):
            if _TARGET.fullmatch(text) and text not in known:
                raise UserError(f"--allow: the host's reward.{domain}.args name {text}; add it: {domain}=...,{text}")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


class WorkerNode:
    """The node's event loop, on one DEALER socket. A signal handler may call `drain`."""

    def __init__(self, address: str, keys: ClientKeys, allowed: AllowList, workers: int, sandbox: str) -> None:
        """UserError if the address is malformed. `workers` counts for each domain."""
        self._address, self._allowed, self._workers, self._sandbox = address, allowed, workers, sandbox
        self._name = f"{socket.gethostname()}:{os.getpid()}"[:200]
        self._context = zmq.Context()
        try:
            self._dealer = open_dealer(self._context, address, keys, only_connected=True)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(f"--connect: {address}: {error.strerror}") from None
        self._loop = EventLoop()
        self._loop.watch(self._dealer, self._receive)
        self._host = ""  # the host that has welcomed us
        self._specs: dict[str, wire.PoolSpec] = {}
        self._pools: dict[str, Pool] = {}
        self._jobs: dict[int, ScoreJob] = {}
        self._replies: list[wire.ScoreReply] = []
        self._last_seen = self._alone_since = 0.0
        self._next_heartbeat = 0.0
        self._warned = False
        self._ended = False
        self._drain_until: float | None = None

    def run(self) -> None:
        """Serve until the host says that the run is over or is silent for long. UserError if it cannot work here."""
        try:
            while not self._ended and not self._drained() and not self._abandoned():
                self._loop.run_once(busy=bool(self._replies) or any(pool.busy for pool in self._pools.values()))
                self._tick()
        finally:
            send(self._dealer, wire.Goodbye())
            for pool in self._pools.values():
                pool.close()
            self._context.destroy(linger=LINGER_MS)

    def drain(self) -> None:
        """Take no more requests, and end once all that are running are judged or `DRAIN_SECONDS` have passed."""
        if self._drain_until is None:
            self._drain_until = self._loop.now + DRAIN_SECONDS
            self._next_heartbeat = 0.0  # the host should know at once

    def _tick(self) -> None:
        for pool in self._pools.values():
            pool.tick()
            if pool.broken:
                raise UserError(pool.broken)
        while self._replies and send(self._dealer, wire.ScoreReplies(self._replies[: wire.BATCH_ITEMS])):
            del self._replies[: wire.BATCH_ITEMS]
        if self._loop.now >= self._next_heartbeat:
            self._next_heartbeat = self._loop.now + HEARTBEAT_SECONDS
            self._send_heartbeat()

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        return self._loop.now > self._drain_until or not (self._jobs or self._replies)

    def _abandoned(self) -> bool:
        """Return whether the host is gone for good. UserError if none has ever answered."""
        if self._host:
            return self._loop.now - self._last_seen > SILENCE_SECONDS
        waited = self._loop.now - self._alone_since
        if waited > WARN_SECONDS and not self._warned:
            self._warned = True
            _log(f"{self._address} has not answered: not up yet, or does not list this node's key")
        if waited > JOIN_SECONDS:
            raise UserError(f"--connect: {self._address} did not answer within {JOIN_SECONDS:g} s")
        return False

    # -- the host -------------------------------------------------------------------------------------------------

    def _send_heartbeat(self) -> None:
        if not self._host:
            send(self._dealer, wire.NodeJoin(self._name, self._allowed.domains))
            return
        draining = self._drain_until is not None
        windows = {domain: 0 if draining else pool.window for domain, pool in self._pools.items()}
        running = [*self._jobs, *(item.id for item in self._replies)]
        send(self._dealer, wire.NodeHeartbeat(self._host, windows, running))

    def _receive(self) -> None:
        for frames in received(self._dealer):
            try:
                message = wire.TO_NODE.decode(b"".join(frames))
            except wire.WireError as error:
                _log(f"a frame from the host is malformed: {error}")
                continue
            self._last_seen = self._loop.now
            self._on_message(message)

    def _on_message(
        self, message: wire.NodeWelcome | wire.ScoreRequests | wire.Pong | wire.Goodbye | wire.Error
    ) -> None:
        if isinstance(message, wire.NodeWelcome):
            self._on_welcome(message)
        elif isinstance(message, wire.ScoreRequests):
            for item in message.items:
                self._on_request(item)
        elif isinstance(message, wire.Goodbye):
            self._ended = True
        elif isinstance(message, wire.Error):
            raise UserError(f"--connect: {self._address} refused: {message.detail}")
        elif self._host and message.host != self._host:  # a new host, or one that took us for lost
            self._forget_host()

    def _forget_host(self) -> None:
        for job in self._jobs.values():
            job.cancelled = True
        self._jobs.clear()
        self._replies.clear()
        self._host = ""
        self._alone_since, self._next_heartbeat = self._loop.now, 0.0

    def _on_welcome(self, welcome: wire.NodeWelcome) -> None:
        """Open the pools that the host names, and keep those whose spec is the same as before."""
        self._forget_host()
        if not welcome.pools:
            raise UserError(f"--allow: the host has nothing to do in {', '.join(self._allowed.domains)}")
        for domain, wanted in welcome.pools.items():
            self._allowed.check(domain, wanted)
            spec = msgspec.structs.replace(wanted, workers=self._workers, cpus=[], sandbox=self._sandbox, url="")
            if self._specs.get(domain) != spec:
                if domain in self._pools:
                    self._pools[domain].close()
                self._pools[domain] = Pool(domain, spec, self._resolve, self._loop)
                self._specs[domain] = spec
        self._host = welcome.host
        _log(f"serving {', '.join(welcome.pools)} of {self._address}")

    def _on_request(self, item: wire.ScoreRequest) -> None:
        pool = self._pools.get(item.domain)
        if pool is None or item.id in self._jobs or len(self._jobs) >= 2 * wire.WINDOW:
            return  # it is not in our heartbeat, so that the host takes it back
        try:
            wire.SCORE_INPUT.unpack(item.input)
        except wire.WireError as error:
            self._replies.append(wire.ScoreReply(item.id, Verdict("error", detail=str(error))))
            return
        self._jobs[item.id] = job = ScoreJob(b"", item.id, item.domain, item.timeout, item.input)
        pool.submit(job)

    def _resolve(self, job: ScoreJob, verdict: Verdict) -> None:
        pool = self._pools.get(job.domain)
        if job.cancelled or pool is None or pool.broken:
            return  # a node without workers gives no verdicts
        pool.verdicts += 1
        self._jobs.pop(job.id, None)
        self._replies.append(wire.ScoreReply(job.id, verdict))


def _log(text: str) -> None:
    tell(f"sidecar: {text}")
