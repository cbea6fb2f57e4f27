"""A rank's connections to sidecar hosts, with thousands of calls in flight.

Calls are spread over the hosts that answer. Calls of a lost host are sent once more, to another. All clocks count only
time in which the event loop ran: after a minute of computation no host counts as lost. Not thread-safe; one event loop
at a time. `ScoreClient` and `RemoteEnvironments` define the calls.
"""

import asyncio
import heapq
import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from spmd_rl.base.curve_keys import ClientKeys
from spmd_rl.base.errors import tell
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.launcher import HostProcess
from spmd_rl.sidecar.sockets import open_dealer, received, send

TICK_SECONDS = 0.1
LEASE_SECONDS = 5.0
"""Silence after which a host is lost; the rank that started it kills it."""
START_SECONDS = 30.0
"""Time without any answering host, after which all calls fail."""
GRACE_SECONDS = 20.0
"""Time beyond its patience after which a pool without progress is given up."""


class Call(msgspec.Struct, eq=False):
    """A call in flight."""

    id: int
    pool: str
    request: msgspec.Struct
    num_bytes: int
    reply: asyncio.Future | None
    """None for a message without a reply."""
    link: "HostLink | None" = None
    since: float = 0.0
    repeated: bool = False
    """True if it was sent before to a lost host."""
    waits: bool = True
    """True for a call that needs a free worker (a score, a reset): these count in `wire.WINDOW`. Others are sent at
    once.
    """


class HostLink:
    """A connection to one host; after a loss, a new socket, so that no old message arrives."""

    def __init__(self, context: zmq.Context, address: str, keys: ClientKeys | None) -> None:
        """ZMQError if the address is malformed."""
        self._context, self.address, self._keys = context, address, keys
        self.heard = 0.0
        """Time of the last answer, or of the start."""
        self.moved: dict[str, float] = {}
        """Time of each pool's last progress."""
        self.load: Counter[str] = Counter()
        """Waiting calls plus open sessions, by pool."""
        self.open()

    def open(self) -> None:
        """Connect, with nothing in flight."""
        self.socket = open_dealer(self._context, self.address, self._keys, only_connected=True)
        self._lost = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.pools: dict[str, wire.PoolPulse] = {}
        """Empty while the host refuses calls."""
        self.answers = False
        self.refused: set[str] = set()
        """Pools with other settings than this rank's."""
        self.calls: dict[int, Call] = {}
        self.unsent: deque[Call] = deque()
        self.num_waiting = self.num_bytes = 0
        self.load.clear()

    def close(self) -> None:
        """Close the connection."""
        self.socket.disable_monitor()
        self._lost.close(linger=0)
        self.socket.close(linger=0)

    def send(self, message: msgspec.Struct) -> bool:
        """Send a message now; False without a connection, or if its queue is full."""
        return send(self.socket, message)

    @property
    def is_lost(self) -> bool:
        """True if the connection has broken since the last read of this property."""
        return bool([*received(self._lost)])

    @property
    def has_room(self) -> bool:
        """True if a call that may wait can be sent."""
        return self.num_waiting < wire.WINDOW and self.num_bytes < wire.WINDOW_BYTES

    def take(self, call: Call, now: float) -> None:
        """Queue a call for the next flush."""
        call.link, call.since = self, now
        self.calls[call.id] = call
        self.unsent.append(call)
        if call.waits:
            self.num_waiting += 1
            self.num_bytes += call.num_bytes
            self.load[call.pool] += 1

    def drop(self, call: Call) -> None:
        """Forget a finished call."""
        if self.calls.pop(call.id, None) is not None and call.waits:
            self.num_waiting -= 1
            self.num_bytes -= call.num_bytes
            self.load[call.pool] -= 1

    def next_batch(self) -> list[Call]:
        """Remove and return the next frame's calls."""
        batch, size = [], 0
        while self.unsent and len(batch) < wire.BATCH_ITEMS and size < wire.BATCH_BYTES:
            call = self.unsent.popleft()
            if call.reply is None or not call.reply.done():
                size += call.num_bytes
                batch.append(call)
        return batch

    def note(self, pong: wire.Pong, specs: Mapping[str, str], now: float) -> None:
        """Store the host's report of its pools."""
        for pool, pulse in pong.pools.items():
            known = self.pools.get(pool)
            if known is None or known.progress != pulse.progress:
                self.moved[pool] = now
            if pulse.spec != specs.get(pool) and pool in specs and pool not in self.refused:
                self.refused.add(pool)
                _warn(f"{self.address} has other settings of {pool} than this run and is not used for it")
        self.pools = pong.pools


class HostClient:
    """Base of clients. host: the process at the first address, if started by this rank."""

    def __init__(
        self,
        addresses: Sequence[str],
        patience: Mapping[str, float],
        specs: Mapping[str, str],
        host: HostProcess | None,
        keys: ClientKeys | None = None,
    ) -> None:
        """patience: seconds without progress while calls wait, by pool. specs: digest of a pool's settings; hosts with
        another digest are not used for it.
        """
        self.host = host
        self.on_reply: Callable[[], None] | None = None
        self.patience, self._specs = dict(patience), dict(specs)
        self.ids = itertools.count()
        self._context = zmq.Context()
        self.links = [HostLink(self._context, address, keys) for address in addresses]
        self._calls: dict[int, Call] = {}
        self._outbox: dict[str, deque[Call]] = {pool: deque() for pool in self.patience}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flushing = False
        self.now = 0.0
        """Seconds in which the event loop ran."""
        self._last_tick = 0.0

    @property
    def outstanding(self) -> int:
        """Number of calls without a reply."""
        return len(self._calls)

    def close(self) -> None:
        """Close the connections and cancel pending calls."""
        calls, self._calls = self._calls, {}
        if self._loop is not None and not self._loop.is_closed():
            for call in calls.values():
                call.reply.cancel()
        self._detach()
        for link in self.links:
            link.close()
        self._context.destroy(linger=0)

    # -- what a subclass defines ----------------------------------------------------------------------------------

    def _message(self, calls: list[Call]) -> msgspec.Struct:
        raise NotImplementedError

    def _cancel(self, call: Call) -> None:
        raise NotImplementedError

    def _on_replies(self, link: HostLink, message: msgspec.Struct) -> None:
        raise NotImplementedError

    def _on_gone(self, link: HostLink) -> None:
        """Forget the state at a lost host."""

    def _fail(self, call: Call, reason: str, detail: str) -> None:
        """Settle a failed call. reason: `timeout`, or `error` if its host is gone."""
        raise NotImplementedError

    # -- calls ----------------------------------------------------------------------------------------------------

    async def request(
        self, id_: int, pool: str, request: msgspec.Struct, num_bytes: int, link: HostLink | None = None
    ) -> Any:
        """Send a call and await its reply; cancelling it cancels the call. link: connection to use at once."""
        self._attach()
        call = Call(id_, pool, request, num_bytes, self._loop.create_future(), waits=link is None)
        self._calls[id_] = call
        if link is None:
            self._outbox[pool].append(call)
        else:
            link.take(call, self.now)
        self.flush_soon()
        try:
            return await call.reply
        finally:
            self._on_done(call)

    def open_call(self, id_: int) -> Call | None:
        """Return the pending call of this number."""
        call = self._calls.get(id_)
        return call if call is not None and not call.reply.done() else None

    def settle(self, call: Call, reply: Any) -> None:
        """Set a call's reply, which counts as progress."""
        call.reply.set_result(reply)
        call.link.moved[call.pool] = self.now

    def _on_done(self, call: Call) -> None:
        if self._calls.pop(call.id, None) is None:
            return  # closed
        if (link := call.link) is not None:
            link.drop(call)
            if call.reply.cancelled():
                self._cancel(call)
        self.flush_soon()

    # -- the event loop -------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        assert not self._calls, "a sidecar client serves one event loop at a time"
        self._detach()
        self._loop = loop
        self._last_tick = time.monotonic()
        for link in self.links:
            # While no event loop ran, no reply could arrive: that silence is not the host's.
            link.heard = self.now
            loop.add_reader(link.socket.FD, self._receive, link)
        self._timer = loop.call_soon(self._tick)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for link in self.links:
                self._loop.remove_reader(link.socket.FD)
            self._timer.cancel()
        self._loop = None
        self._flushing = False

    def _tick(self) -> None:
        now = time.monotonic()
        self.now += min(now - self._last_tick, 2 * TICK_SECONDS)
        self._last_tick = now
        for link in self.links:
            self._receive(link)
            self._check(link)
            link.send(wire.Ping())
        self._check_all()
        self._flush()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    # -- sending --------------------------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Schedule one flush in this round of the event loop: calls made together share frames."""
        if not self._flushing and self._loop is not None and not self._loop.is_closed():
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        for pool, calls in self._outbox.items():
            if calls:
                self._spread(pool, calls)
        for link in self.links:
            while batch := link.next_batch():
                if not link.send(self._message(batch)):
                    link.unsent.extendleft(reversed(batch))
                    break
            # ZeroMQ's descriptor is edge-triggered, and a send may consume the edge: read now, or replies wait for the
            # next tick.
            self._receive(link)

    def _spread(self, pool: str, calls: deque[Call]) -> None:
        # Each to the host with the fewest calls per worker.
        serving = [link for link in self.links if pool in link.pools and pool not in link.refused]
        # Without a working pool, a broken one still answers with the reason.
        able = [link for link in serving if link.pools[pool].places] or serving
        parts = [1 / max(1, link.pools[pool].places) for link in able]
        shares = [(link.load[pool] * part, place) for place, (link, part) in enumerate(zip(able, parts, strict=True))]
        heapq.heapify(shares)
        while calls and shares:
            share, place = shares[0]
            if not able[place].has_room:
                heapq.heappop(shares)
            elif not (call := calls.popleft()).reply.done():
                able[place].take(call, self.now)
                heapq.heapreplace(shares, (share + parts[place], place))

    # -- receiving ------------------------------------------------------------------------------------------------

    def _receive(self, link: HostLink) -> None:
        if link.is_lost and link.answers:
            self._lose(link, "the connection broke")
            return
        for frames in received(link.socket, limit=sys.maxsize):
            try:
                message = wire.TO_CLIENT.decode(b"".join(frames))
            except wire.WireError as error:
                _warn(f"a frame from the host is malformed: {error}")
                continue
            link.heard, link.answers = self.now, True
            if isinstance(message, wire.Pong):
                link.note(message, self._specs, self.now)
                self.flush_soon()
            elif isinstance(message, wire.Error):
                _warn(f"the host refused a frame: {message.detail}")
            else:
                self._on_replies(link, message)
                if self.on_reply is not None:
                    self.on_reply()

    # -- failures -------------------------------------------------------------------------------------------------

    def _lose(self, link: HostLink, why: str) -> None:
        self._loop.remove_reader(link.socket.FD)
        link.close()
        calls = [call for call in link.calls.values() if not call.reply.done()]
        link.open()
        link.heard = self.now
        self._loop.add_reader(link.socket.FD, self._receive, link)
        self._on_gone(link)
        for call in reversed(calls):
            call.link = None
            if call.repeated or not call.waits:
                self._fail(call, "error", f"its sidecar host {link.address} is gone: {why}")
            else:
                call.repeated = True
                self._outbox[call.pool].appendleft(call)

    def _check(self, link: HostLink) -> None:
        if link.answers and self.now - link.heard > LEASE_SECONDS:
            if self.host is not None and link is self.links[0]:
                _warn("the host hangs; killing it")
                self.host.kill()
            self._lose(link, f"silent for {LEASE_SECONDS:g} s")
        oldest: dict[str, Call] = {}  # by pool: the call that has waited longest
        for call in link.calls.values():
            oldest.setdefault(call.pool, call)
        for pool, first in oldest.items():
            patience = self.patience[pool] + GRACE_SECONDS
            if self.now - max(link.moved[pool], first.since) > patience:
                calls = (call for call in link.calls.values() if call.pool == pool)
                self._fail_all(calls, "timeout", f"no progress at the sidecar for {patience:g} s")

    def _check_all(self) -> None:
        if self.now - max(link.heard for link in self.links) > START_SECONDS:
            self._fail_all(self._calls.values(), "error", f"no sidecar host has answered for {START_SECONDS:g} s")

    def _fail_all(self, calls: Iterable[Call], reason: str, detail: str) -> None:
        for call in list(calls):
            if not call.reply.done():
                self._fail(call, reason, detail)


def _warn(text: str) -> None:
    tell(f"sidecar: {text}")
