"""A CPU-only node's part: workers that judge what a host elsewhere has too much of.

    python -m spmd_rl.sidecar --connect tcp://HOST:PORT --keys DIR --allow math=rewards.math_verify:MathReward

The host says which rewarder a domain has and its arguments; this line says which classes may be imported here, how
many workers there are and which sandbox they use. Pools, deadlines and condemnations are those of a host (`pool.py`).
Nothing is kept: what this node owes when it is lost, the host has others do. Leaves out how the host shares out work.
"""

import os
import re
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys, bound
from spmd_rl.errors import UserError
from spmd_rl.sidecar.pool import Job, Pool
from spmd_rl.types import Verdict

BEAT_SECONDS = 0.5
"""Between two words to the host."""
JOIN_SECONDS = 600.0
"""Until a host must have been there: it may start later than we."""
WARN_SECONDS = 10.0
"""Until we say that we wait."""
SILENCE_SECONDS = 60.0
"""A host that was there and is silent for so long is not coming back; the run is over."""
DRAIN_SECONDS = 10.0
"""For what is under way when this node is asked to end."""
SWEEP_SECONDS = 0.02
"""Longest wait of the loop while deadlines run."""
MAX_GAP = 0.25
"""A longer pause of the loop counts as this much of a deadline."""
FRAMES_PER_ROUND = 64
LINGER_MS = 500
_TARGET = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


class Allowed:
    """What may be imported here: `DOMAIN=MODULE:CLASS[,MODULE:CLASS...]`, the domain's own first, then its parts'."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._targets: dict[str, list[str]] = {}
        for line in lines:
            domain, _, targets = line.partition("=")
            self._targets[domain] = targets.split(",")
            if not domain or not all(map(_TARGET.fullmatch, self._targets[domain])):
                raise UserError(f"--allow: must be DOMAIN=MODULE:CLASS, not {line!r}")

    @property
    def domains(self) -> list[str]:
        """All that are named."""
        return list(self._targets)

    def check(self, domain: str, spec: wire.Pool) -> None:
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


class Attached:
    """The loop, on one DEALER socket. `drain` may be called from a signal's handler."""

    def __init__(self, address: str, keys: ClientKeys, allowed: Allowed, workers: int, sandbox: str) -> None:
        self._address, self._allowed, self._workers, self._sandbox = address, allowed, workers, sandbox
        self._name = f"{socket.gethostname()}:{os.getpid()}"[:200]
        self._context = zmq.Context()
        self._dealer = _dealer(self._context, address, keys)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._dealer.FD, selectors.EVENT_READ, None)
        self._host = ""  # whose offer we took
        self._specs: dict[str, wire.Pool] = {}
        self._pools: dict[str, Pool] = {}
        self._jobs: dict[int, Job] = {}
        self._verdicts: list[wire.RawJudged] = []
        self._seen = time.monotonic()
        self._now = 0.0  # seconds in which this loop ran
        self._heard = self._began = 0.0
        self._written = -BEAT_SECONDS
        self._warned = False
        self._over = False
        self._drain_until: float | None = None

    def run(self) -> None:
        """Serve until the host says that the run is over, or is gone for long. UserError for what cannot work here."""
        try:
            while self._round():
                pass
        finally:
            self._send(wire.Leave())
            for pool in self._pools.values():
                pool.close()
            self._context.destroy(linger=LINGER_MS)

    def drain(self) -> None:
        """Take nothing more, and end once all that is under way is judged, or soon anyway."""
        if self._drain_until is None:
            self._drain_until = self._now + DRAIN_SECONDS
            self._written = -BEAT_SECONDS  # the host should know at once

    def _round(self) -> bool:
        ready = self._dealer.EVENTS & zmq.POLLIN
        busy = self._verdicts or any(pool.busy for pool in self._pools.values())
        patience = 0.0 if ready else SWEEP_SECONDS if busy else BEAT_SECONDS
        awake = [key.data for key, _ in self._selector.select(patience) if key.data is not None]
        now = time.monotonic()
        # nobody's deadline runs while a worker is idle, so that a long wait for work is none of its time
        self._now += min(now - self._seen, max(MAX_GAP, patience))
        self._seen = now
        for pool, worker in awake:
            pool.heed(worker, self._now)
        self._take_in()
        for pool in self._pools.values():
            pool.tick(self._now)
            if pool.broken:
                raise UserError(pool.broken)
        self._send_verdicts()
        if self._now - self._written >= BEAT_SECONDS:
            self._written = self._now
            self._beat()
        return not self._over and not self._drained() and not self._alone()

    def _drained(self) -> bool:
        if self._drain_until is None:
            return False
        return self._now > self._drain_until or not (self._jobs or self._verdicts)

    def _alone(self) -> bool:
        if self._host:
            return self._now - self._heard > SILENCE_SECONDS
        waited = self._now - self._began
        if waited > WARN_SECONDS and not self._warned:
            self._warned = True
            why = "not up yet, or does not list this node's key"
            print(f"sidecar: {self._address} has not answered: {why}", file=sys.stderr, flush=True)
        if waited > JOIN_SECONDS:
            raise UserError(f"--connect: {self._address} did not answer within {JOIN_SECONDS:g} s")
        return False

    # -- the host -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        if not self._host:
            self._send(wire.Join(self._name, self._allowed.domains))
            return
        draining = self._drain_until is not None
        windows = {domain: 0 if draining else pool.window for domain, pool in self._pools.items()}
        self._send(wire.Serve(self._host, windows, [*self._jobs, *(item.id for item in self._verdicts)]))

    def _take_in(self) -> None:
        for _ in range(FRAMES_PER_ROUND):
            try:
                message = wire.TO_NODE.decode(self._dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except wire.WireError as error:
                print(f"sidecar: a frame from the host was {error}", file=sys.stderr, flush=True)
                continue
            self._heard = self._now
            self._understand(message)

    def _understand(self, message: wire.Offer | wire.Scores | wire.Pong | wire.Leave | wire.Error) -> None:
        if isinstance(message, wire.Offer):
            self._take_on(message)
        elif isinstance(message, wire.Scores):
            for item in message.items:
                self._submit(item)
        elif isinstance(message, wire.Leave):
            self._over = True
        elif isinstance(message, wire.Error):
            raise UserError(f"--connect: {self._address} refused: {message.detail}")
        elif self._host and message.host != self._host:  # a new host, or one that took us for lost
            self._forget()

    def _forget(self) -> None:
        for job in self._jobs.values():
            job.dropped = True
        self._jobs.clear()
        self._verdicts.clear()
        self._host = ""
        self._began, self._written = self._now, -BEAT_SECONDS

    def _take_on(self, offer: wire.Offer) -> None:
        """Make the pools that the host asks for, and keep those that are as they were."""
        self._forget()
        if not offer.pools:
            raise UserError(f"--allow: the host has nothing to do in {', '.join(self._allowed.domains)}")
        for domain, asked in offer.pools.items():
            self._allowed.check(domain, asked)
            spec = msgspec.structs.replace(asked, workers=self._workers, cpus=[], sandbox=self._sandbox, url="")
            if self._specs.get(domain) != spec:
                if domain in self._pools:
                    self._pools[domain].close()
                self._pools[domain] = Pool(domain, spec, self._resolve, self._selector)
                self._specs[domain] = spec
        self._host = offer.host
        print(f"sidecar: serving {', '.join(offer.pools)} of {self._address}", file=sys.stderr, flush=True)

    def _submit(self, item: wire.Score) -> None:
        if item.id in self._jobs or len(self._jobs) >= 2 * wire.WINDOW:
            return
        job = Job(b"", item.id, item.domain, item.timeout, item.question)
        if (pool := self._pools.get(item.domain)) is None:
            return  # not in our lists: the host takes it back
        try:
            wire.QUESTION.unpack(item.question)
        except wire.WireError as error:
            self._verdicts.append(wire.RawJudged(item.id, wire.pack(Verdict("error", detail=str(error)))))
            return
        self._jobs[item.id] = job
        pool.submit(job)

    def _resolve(self, job: Job, verdict: msgspec.Raw) -> None:
        pool = self._pools.get(job.domain)
        if job.dropped or pool is None or pool.broken:
            return  # a node without workers has no opinion
        pool.verdicts += 1
        self._jobs.pop(job.id, None)
        self._verdicts.append(wire.RawJudged(job.id, verdict))

    def _send_verdicts(self) -> None:
        while self._verdicts:
            batch = self._verdicts[: wire.BATCH_ITEMS]
            if not self._send(wire.RawVerdicts(batch)):
                return
            del self._verdicts[: len(batch)]

    def _send(self, message: msgspec.Struct) -> bool:
        try:
            self._dealer.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def _dealer(context: zmq.Context, address: str, keys: ClientKeys) -> zmq.Socket:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))
    dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a host that is not there
    dealer.setsockopt(zmq.SNDHWM, wire.WINDOW)
    dealer.setsockopt(zmq.RCVHWM, wire.WINDOW)
    dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    bound(dealer, address)
    keys.secure(dealer)
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise UserError(f"--connect: {address}: {error.strerror}") from None
    return dealer
