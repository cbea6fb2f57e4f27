"""`TrainerServer`: what a training rank keeps for generating ranks to fetch, and what they have handed in to it.

A thread of its own answers them, so that they never wait for training. They may send anything, stop or die at any
moment: what is not understood, or not from a member, is dropped and costs nothing but a line now and then. The first
training rank has the `WorkQueue`.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch.distributed as dist
import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import HostKeys
from spmd_rl.distributed import World
from spmd_rl.errors import UserError, tell
from spmd_rl.process import in_background
from spmd_rl.sidecar.authenticator import Authenticator
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.gate import Gate
from spmd_rl.sidecar.sockets import open_router, received, remove_socket, socket_path
from spmd_rl.split import messages
from spmd_rl.split.messages import Kind
from spmd_rl.split.pieces import DAMAGED
from spmd_rl.split.queues import Accepted, Place
from spmd_rl.split.seal import Seal
from spmd_rl.split.work_queue import WorkQueue
from spmd_rl.weights.messages import REQUESTS, FromMember, digest
from spmd_rl.weights.staged import StagedWeights

WAIT_SECONDS = 0.2
"""The main thread's pause between two looks at whether the thread lives."""
FETCH_SECONDS = 600.0
"""For so long a publish waits for ranks that fetch an older version; where they have a lease, for ten leases."""
BEAT_SECONDS, BEATS_PER_SECOND = 0.05, 500
"""Between beats of a member, at least; and how many of all members a training rank answers."""
UNREAD = 32
"""Answers that wait for one peer to read; more are dropped. Who reads has `weights.client.AHEAD` at most, but libzmq
counts what was read only every so often."""
MAX_BEGUN = 1 << 16
"""Slices that were begun, and members that have left, of which this rank knows; the oldest go first."""
MAX_PROBED = 4096
"""Answers to a probe that this rank keeps."""
MAX_CONNECTIONS = 4096
"""Generating ranks have up to three each."""
SAY_SECONDS = 10.0
"""Between two lines about messages that make no sense."""

T = TypeVar("T")


class Checked(NamedTuple):
    """A piece that is what it should be."""

    value: Any
    report: bytes
    """What the queue is told of it."""


class Kept(NamedTuple):
    """A piece that lies here."""

    claim: int
    checked: Checked


class Rules(Protocol):
    """What a piece must be."""

    def check(self, member: int, kind: Kind, number: int, place: Place, payload: memoryview) -> Checked:
        """Return what the bytes of a piece are. One of `pieces.DAMAGED` if they are none, or should not lie here."""
        ...

    def is_late(self, kind: Kind, number: int) -> bool:
        """Return whether pieces claimed for this work cannot count any more."""
        ...


def own_address() -> str:
    """Return the address of this machine at which the others of the job can reach it."""
    family, _, _, _, master = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(master)  # nothing is sent
        address = probe.getsockname()[0]
    return f"[{address}]" if ":" in address else address


def bind_of(world: World) -> str:
    """Return where this rank's server listens: in a directory of the machine, or on all addresses."""
    if world.local_size < dist.get_world_size():
        return "tcp://*"
    folder = Path(world.node.address.removeprefix("ipc://")).parent
    return f"ipc://{folder.with_name(folder.name + '-x')}/{secrets.token_hex(4)}"


class TrainerServer:
    """Serves until it is closed. All methods but the thread's are for the main thread."""

    def __init__(
        self, bind: str, seal: Seal, max_bytes: int, keys: HostKeys | None = None, lease_seconds: float = inf
    ) -> None:
        """bind: an `ipc://` path in a directory of this user's alone, or `tcp://ADDRESS`, whose port is any free one.

        seal: of all training ranks of the job. max_bytes: of a frame. keys: whose clients alone are served.
        lease_seconds: members that are silent for longer fetch nothing any more. UserError if nothing can listen there.
        """
        self._lock = threading.Condition()
        self._context, self._loop = zmq.Context(), EventLoop()
        limit = 10 * lease_seconds if lease_seconds < inf else FETCH_SECONDS
        self.weights = StagedWeights(self._lock, self._wait, limit, lambda: self._loop.now)
        self.queue: WorkQueue | None = None
        """On the first training rank."""
        self._seal, self._lease, self._max_bytes = seal, lease_seconds, max(max_bytes, wire.MAX_FRAME_BYTES)
        self._welcome: messages.Welcome | None = None
        self.rules: Rules | None = None
        """What pieces must be; until it is here none is taken."""
        self._newest, self._over = b"", False
        self._heard: dict[int, float] = {}
        """When each member with a lease was last heard of here, in the seconds in which this server ran."""
        self._deposits: dict[tuple[Kind, int], dict[Place, Kept]] = {}
        """Of each place, what was made by its latest claim: no other can count. Of a probe, by (member,)."""
        self._begun: dict[Place, bytes] = {}
        self._left: dict[int, None] = {}
        self._num_dropped, self._say_at = 0, 0.0
        if keys is not None:
            Authenticator(self._context, keys, self._loop)
        router = open_router(self._context, keys, self._max_bytes, UNREAD)
        address = bind if socket_path(bind) else f"{bind}:0"
        try:
            self._gate = Gate(router, address, keys is not None, self._loop, "placement.bind", 0, MAX_CONNECTIONS)
        except UserError:
            self._context.destroy(linger=0)
            raise
        self._socket, self.address = router[0], self._gate.address.replace("*", own_address() if "*" in bind else "*")
        self._loop.watch(self._socket, self._receive)
        self._closing = False
        self._served = in_background("trainer server", self._serve)

    # -- for the main thread ---------------------------------------------------------------------------------------

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds in which this server ran: a training job that was stopped gives nobody up for that."""
        return lambda: self._loop.now

    def open(self, queue: WorkQueue | None, welcome: messages.Welcome | None = None) -> None:
        """Answer members from now on. welcome: for jobs that ask what this one is, which may attach then."""
        with self._lock:
            self.queue, self._welcome = queue, welcome

    def with_queue(self, do: Callable[[WorkQueue], T]) -> T:
        """Return what `do` finds in the queue, or does there."""
        assert self.queue is not None, "the first training rank has the queue"
        with self._lock:
            return do(self.queue)

    def announce(self, announcement: bytes, ask: Callable[[WorkQueue], None]) -> None:
        """Let members know of the newest version, and of what is asked of it."""
        self.with_queue(ask)
        with self._lock:
            self._newest = announcement

    def wait(self, seconds: float, until: Callable[[WorkQueue], bool]) -> bool:
        """Wait, so many seconds at most; return whether it has come to that."""
        deadline = time.monotonic() + seconds
        with self._lock:
            while not (found := until(self.queue)) and time.monotonic() < deadline:
                self._wait()
            return found

    def collect(self, kind: Kind, pieces: list[Accepted]) -> list[Any]:
        """Return these pieces, which lie here, and forget whatever cannot count any more."""
        with self._lock:
            kept = [self._deposits[kind, one.number].pop(one.place or (one.member,)) for one in pieces]
            assert [one.claim for one in kept] == [one.claim for one in pieces], "a piece lies here that does not count"
            for key in [key for key in self._deposits if self.rules.is_late(*key)]:
                del self._deposits[key]
        return [one.checked.value for one in kept]

    def end(self) -> None:
        """Let members know that the run has ended."""
        with self._lock:
            self._over = True

    def wait_until_left(self, seconds: float) -> None:
        """Wait, so many seconds at most, until all members have left."""
        if self.queue is not None:
            self.wait(seconds, lambda queue: not queue.members)

    def close(self) -> None:
        """Stop serving; idempotent. Raises what ended the thread, if anything did."""
        self._closing = True
        try:
            self._served.result()
        finally:
            remove_socket(self.address)

    def _wait(self) -> None:
        """Wait for news from the thread, a moment at most; raise what ended it."""
        if self._served.done():
            self._served.result()
            raise AssertionError("the server has been closed")
        self._lock.wait(WAIT_SECONDS)
        if self.queue is not None:
            self.queue.expire()

    def _forget(self, member: int) -> None:
        self._heard.pop(member, None)
        self.weights.forget(member)
        self._lock.notify_all()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._loop.run_once(self._gate.busy)
                self._gate.tick()
                with self._lock:
                    for member in [one for one, heard in self._heard.items() if self._loop.now - heard > self._lease]:
                        self._forget(member)
        finally:
            self._gate.close()
            self._context.destroy(linger=0)

    def _receive(self) -> None:
        for peer, *frames in received(self._socket, copy=False):
            self._gate.read([peer, *frames])
            try:
                header, *payload = frames
                if len(payload) > 1 or len(header) > wire.MAX_FRAME_BYTES:
                    raise wire.WireError("a message has one or two frames")
                message = messages.FROM_MEMBERS.decode(header.bytes)
                with self._lock:
                    reply = self._answer(peer.bytes, message, payload[0].buffer if payload else memoryview(b""))
                    self._lock.notify_all()
            except DAMAGED as error:
                self._say(f"dropped a message that makes no sense: {error}")
                continue
            if reply:
                try:
                    self._socket.send_multipart([peer.bytes, *reply], zmq.NOBLOCK, copy=False)
                except zmq.ZMQError:  # it reads nothing, or is gone
                    continue

    def _say(self, text: str) -> None:
        """A line now and then."""
        self._num_dropped += 1
        if self._loop.now >= self._say_at:
            self._say_at = self._loop.now + SAY_SECONDS
            tell(f"split: {text} ({self._num_dropped} so far)")

    def _answer(self, peer: bytes, message: wire.WireMessage, payload: memoryview) -> list[Any]:
        """The frames of the answer, if there is one."""
        if not isinstance(message, FromMember):
            reply = self._welcome_to(message, peer) if self._welcome else None
            return [wire.encode(reply)] if reply else []
        if not self._seal.admits(message):
            raise wire.WireError(f"{type(message).__name__} of who is no member")
        if message.member in self._heard:
            self._heard[message.member] = self._loop.now
        match message:
            case messages.Deposit():
                return self._deposited(message, payload)
            case messages.TakeBegun():
                found = self._begun.pop(tuple(message.place), b"")
                return [wire.encode(messages.Begun(message.place, digest(found))), found]
            case messages.Leave():
                _remember(self._left, message.member, None)
                self._forget(message.member)
                if self.queue is not None:
                    self.queue.leave(message.member)
                return []
            case messages.Beat():
                return [wire.encode(self._news(message))]
            case _ if isinstance(message, REQUESTS):
                if message.member in self._left:
                    raise wire.WireError("weights are for members, and the sender has left")
                return self.weights.answer(message, self._lease == inf or message.member in self._heard)
        return [wire.encode(self._from_queue(message, payload))] if self.queue is not None else []

    def _welcome_to(self, message: wire.WireMessage, peer: bytes) -> wire.WireMessage | None:
        if isinstance(message, messages.Hello):
            return self._welcome
        if self.queue is None or (member := self.queue.join(message.name, message.leads, peer)) is None:
            return None
        return messages.Joined(*self._seal.membership(member))

    def _from_queue(self, message: wire.WireMessage, payload: memoryview) -> wire.WireMessage:
        """The answer of the queue."""
        queue = self.queue
        if isinstance(message, messages.ClaimRequest):
            member, _, kind, number, version, room = msgspec.structs.astuple(message)
            known, ended, pieces, begun_by = queue.claim(member, kind, number, version, room)
            signed = [self._seal.sign("claim", member, kind, one.number, one.place, one.claim) for one in pieces]
            claimed = [
                messages.Claimed(list(one.place), one.claim, signature, by)
                for one, signature, by in zip(pieces, signed, begun_by, strict=True)
            ]
            return messages.ClaimReply(known, ended, claimed)
        member, kind, number, place = message.member, message.kind, message.number, tuple(message.place)
        known = member in queue.members
        if isinstance(message, messages.GiveBack):
            begun = message.begun and self._lease == inf  # what a stranger has begun, nobody goes on with
            return messages.Reported(known, queue.give_back(member, kind, number, place, begun), queue.horizon.step)
        report = bytes(payload)
        if not self._seal.is_signed(message.signature, "report", member, kind, number, place, report):
            raise wire.WireError("a report is not what a training rank found")
        accepted = queue.report(member, kind, number, place, report, message.stats)
        return messages.Reported(known, accepted, queue.horizon.step)

    def _deposited(self, message: messages.Deposit, payload: memoryview) -> list[Any]:
        """Keep a piece once it has been found to be what it should."""
        member, kind, number, place = message.member, message.kind, message.number, tuple(message.place)
        claim = message.claim
        if (kind == "probe" and (place or claim)) or (message.begun and self._lease < inf):
            raise wire.WireError("a piece of no work that there is")
        if kind != "probe" and not self._seal.is_signed(message.signature, "claim", member, kind, number, place, claim):
            raise wire.WireError("a piece that the sender has not claimed")
        report, state, why = b"", "kept", ""
        if self.rules is None or self.rules.is_late(kind, number):
            state = "late"
        elif len(payload) > self._max_bytes or digest(payload) != message.digest:
            state, why = "refused", "it arrived damaged"
        elif message.begun:
            _remember(self._begun, place, bytes(payload))
        else:
            kept, key = self._deposits.setdefault((kind, number), {}), place or (member,)
            try:
                before = kept.get(key)
                if before is None and kind == "probe" and len(kept) >= MAX_PROBED:
                    raise ValueError("too many answer the probe")
                if before is None or before.claim < claim:  # the first of a claim counts, whatever comes later
                    kept[key] = Kept(claim, self.rules.check(member, kind, number, place, payload))
                report, state = kept[key].checked.report, "kept" if kept[key].claim == claim else "late"
            except DAMAGED as error:
                state, why = "refused", str(error)[:300]
                self._say(f"refused a piece, {kind} {number} {list(place)}: {why}")
        signature = self._seal.sign("report", member, kind, number, place, report)
        return [wire.encode(messages.Deposited(state, signature, why)), report]

    def _news(self, beat: messages.Beat) -> messages.News:
        if self._lease < inf and (self.queue is None or beat.member in self.queue.members):
            self._heard[beat.member] = self._loop.now
        if self.queue is None:
            return messages.News(True)
        queue = self.queue
        return messages.News(
            known=queue.beat(beat.member, beat.progress, beat.ready),
            step=queue.horizon.step,
            oldest=max(0, queue.oldest),
            newest=self._newest or None,
            asked=queue.offers_eval(self.weights.newest),
            over=self._over,
            pause=min(max(BEAT_SECONDS, len(queue.members) / BEATS_PER_SECOND), self._lease / 4),
        )


def _remember(kept: dict, key: Any, value: Any) -> None:
    """Put something into a dict whose oldest entries go first."""
    if len(kept) >= MAX_BEGUN:
        kept.pop(next(iter(kept)))
    kept[key] = value
