"""A rank's connection to its node's host: thousands of calls in flight at once, each with an outcome in the end.

Whatever happens to a host or a worker, a call is sent again under its old id until its reply is there, or until it is
given up. All clocks count only time in which the event loop ran: a rank that computes for a minute does not take its
sidecar for dead. Not thread-safe; one event loop at a time. `ScoreClient` and `Environments` say what the calls are.
"""

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys
from spmd_rl.errors import tell
from spmd_rl.sidecar.launcher import HostProcess
from spmd_rl.sidecar.sockets import open_dealer, received, send

TICK_SECONDS = 0.1
"""The pause between two checks of the host and of the calls in flight."""
LEASE_SECONDS = 5.0
"""A host that lives but is silent for this long is killed."""
START_SECONDS = 30.0
"""A host that was just started may be silent for this long."""
RESEND_SECONDS = 5.0
"""A call without a reply is sent again after this time; the host knows it, unless it was lost on the way."""
GRACE_SECONDS = 20.0
"""A pool in which nothing has moved for its patience and this is given up."""
MAX_DEATHS = 5
"""After this many dead hosts in a row, without a reply between, all calls are given up."""


class Call(msgspec.Struct, eq=False):
    """A call under way."""

    id: int
    pool: str
    """The pool at the host, as a `Pong` names it."""
    request: msgspec.Struct
    num_bytes: int
    reply: asyncio.Future
    asked: float
    sent: float | None = None
    """When it was sent, if it is in flight."""
    waits: bool = True
    """Whether it may have to wait at the host, and so counts in the window. Others pass those that wait."""


class HostClient:
    """The base of clients, over one DEALER socket. `host` is the process that this rank looks after, if it does."""

    def __init__(
        self, address: str, patience: Mapping[str, float], host: HostProcess | None, keys: ClientKeys | None = None
    ) -> None:
        """`patience`: by pool, the seconds for which nothing may move there while calls wait."""
        self.host = host
        self.on_reply: Callable[[], None] | None = None
        """Called whenever replies have arrived, such as to wake a loop that waits for them."""
        self.patience = dict(patience)
        self.ids = itertools.count()
        """The numbers of the calls to come."""
        self._context = zmq.Context()
        self._socket = open_dealer(self._context, address, keys)
        self._calls: dict[int, Call] = {}
        self._outbox: deque[int] = deque()
        self._urgent: deque[int] = deque()
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._moved = dict.fromkeys(self.patience, 0.0)  # by pool: when it last made progress
        self._progress: dict[str, int] = {}
        self._host_name = ""  # of the host that answers
        self._host_starts = 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flushing = False
        self._now = 0.0  # seconds in which the loop ran
        self._last_tick = 0.0
        self._patient_until = LEASE_SECONDS

    @property
    def outstanding(self) -> int:
        """The number of calls whose reply is not there yet."""
        return len(self._calls)

    def close(self) -> None:
        """Close the connection. Calls that are outstanding are cancelled."""
        calls, self._calls = self._calls, {}
        if self._loop is not None and not self._loop.is_closed():
            for call in calls.values():
                call.reply.cancel()
        self._detach()
        self._context.destroy(linger=0)

    # -- what a subclass defines ----------------------------------------------------------------------------------

    def _message(self, calls: list[Call]) -> msgspec.Struct:
        """Return the message that carries these calls."""
        raise NotImplementedError

    def _cancellation(self, id_: int) -> msgspec.Struct:
        """Return the message that cancels a call."""
        raise NotImplementedError

    def _before_flush(self) -> None:
        """Send what goes before the calls of this flush: nothing, unless a subclass has more than calls to send."""

    def _on_replies(self, message: msgspec.Struct) -> None:
        """Settle the calls that a message of the host answers."""
        raise NotImplementedError

    def _fail(self, call: Call, reason: str, detail: str) -> None:
        """Settle a call that is given up: `reason` is `timeout`, or `error` where there is no host."""
        raise NotImplementedError

    # -- calls ----------------------------------------------------------------------------------------------------

    async def request(self, id_: int, pool: str, request: msgspec.Struct, num_bytes: int, waits: bool = True) -> Any:
        """Send a call and wait for its reply. Cancelling it cancels the call."""
        self._attach()
        call = Call(id_, pool, request, num_bytes, self._loop.create_future(), self._now, waits=waits)
        self._calls[id_] = call
        self._queue_of(call).append(id_)
        self._flush_soon()
        try:
            return await call.reply
        finally:
            self._on_done(id_)

    def open_call(self, id_: int) -> Call | None:
        """Return the call of this number, if it still waits for its reply."""
        call = self._calls.get(id_)
        return call if call is not None and not call.reply.done() else None

    def settle(self, call: Call, reply: Any) -> None:
        """Give a call its reply, which is progress of its pool."""
        call.reply.set_result(reply)
        self._moved[call.pool] = self._now

    def send(self, message: msgspec.Struct) -> bool:
        """Send a message now; False where the socket takes none."""
        return send(self._socket, message)

    def wake(self) -> None:
        """Flush in this round of the event loop, though no call waits to be sent; nothing where no loop runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._flush_soon(even_if_empty=True)

    def _on_done(self, id_: int) -> None:
        """Forget a call that has its reply, was given up or was cancelled."""
        if (call := self._calls.pop(id_, None)) is None:
            return  # closed
        if call.sent is not None:
            self._landed(call)
            if call.reply.cancelled():
                self.send(self._cancellation(id_))
        self._flush_soon()

    def _landed(self, call: Call) -> None:
        self._in_flight -= call.waits
        self._in_flight_bytes -= call.num_bytes * call.waits
        call.sent = None

    def _queue_of(self, call: Call) -> deque[int]:
        return self._outbox if call.waits else self._urgent

    # -- the event loop -------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Join the running event loop, unless this client is in it already."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        assert not self._calls, "a sidecar client serves one event loop at a time"
        self._detach()
        self._loop = loop
        self._patient_until = self._now + LEASE_SECONDS  # silence while no loop ran means nothing
        self._last_tick = time.monotonic()
        loop.add_reader(self._socket.FD, self._receive)
        self._timer = loop.call_soon(self._tick)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.FD)
            self._timer.cancel()
        self._loop = None
        self._flushing = False

    def _tick(self) -> None:
        now = time.monotonic()
        self._now += min(now - self._last_tick, 2 * TICK_SECONDS)
        self._last_tick = now
        self._receive()
        if self.host is not None:
            self._check_host(self.host)
        elif self._calls and self._now > self._patient_until + START_SECONDS:
            why = "the sidecar's host is gone, and the rank that looks after it replaces it no more"
            self._fail_all(self._calls.values(), "error", why)
        self._resend(older_than=RESEND_SECONDS)
        self._give_up_stuck_pools()
        self.send(wire.Ping())
        self._flush()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    # -- sending --------------------------------------------------------------------------------------------------

    def _flush_soon(self, even_if_empty: bool = False) -> None:
        """Send once in this round of the event loop, so that calls made together travel together."""
        if not self._flushing and (even_if_empty or self._outbox or self._urgent) and not self._loop.is_closed():
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._before_flush()
        while batch := self._next_batch():
            if not self.send(self._message(batch)):
                for call in reversed(batch):
                    self._landed(call)
                    self._queue_of(call).appendleft(call.id)
                break
        self._receive()  # the socket's descriptor reports changes only, and sending may have hidden one

    def _next_batch(self) -> list[Call]:
        batch, size = [], 0
        while len(batch) < wire.BATCH_ITEMS and size < wire.BATCH_BYTES:
            if self._urgent:
                queue = self._urgent
            elif self._outbox and self._in_flight < wire.WINDOW and self._in_flight_bytes < wire.WINDOW_BYTES:
                queue = self._outbox
            else:
                break
            call = self._calls.get(queue.popleft())
            if call is None or call.reply.done() or call.sent is not None:
                continue
            call.sent = self._now
            self._in_flight += call.waits
            self._in_flight_bytes += call.num_bytes * call.waits
            size += call.num_bytes
            batch.append(call)
        return batch

    def _resend(self, older_than: float) -> None:
        for id_, call in self._calls.items():
            if call.sent is not None and not call.reply.done() and self._now - call.sent >= older_than:
                self._landed(call)
                self._queue_of(call).append(id_)
        self._flush_soon()

    # -- receiving ------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for frames in received(self._socket, limit=sys.maxsize):
            try:
                message = wire.TO_CLIENT.decode(b"".join(frames))
            except wire.WireError as error:
                _warn(f"a frame from the host is malformed: {error}")
                continue
            self._patient_until = self._now + LEASE_SECONDS
            if isinstance(message, wire.Pong):
                self._on_pong(message)
            elif isinstance(message, wire.Error):
                _warn(f"the host refused a frame: {message.detail}")
            else:
                if self.host is not None:
                    self.host.deaths = 0
                self._on_replies(message)
                if self.on_reply is not None:
                    self.on_reply()

    def _on_pong(self, pong: wire.Pong) -> None:
        for pool, progress in pong.progress.items():
            if self._progress.get(pool) != progress:
                self._progress[pool] = progress
                self._moved[pool] = self._now
        if self._host_name and pong.host != self._host_name:
            self._resend(older_than=0.0)  # a new host knows nothing of what was in flight
        self._host_name = pong.host

    # -- failures -------------------------------------------------------------------------------------------------

    def _check_host(self, host: HostProcess) -> None:
        if host.starts != self._host_starts:
            self._host_starts = host.starts
            self._host_name = self._host_name or "the first host"
            self._patient_until = self._now + START_SECONDS
        elif self._now > self._patient_until:
            _warn("the host hangs; killing it")
            self._patient_until = self._now + START_SECONDS
            host.kill()
        if host.deaths >= MAX_DEATHS:
            self._fail_all(self._calls.values(), "error", f"{host.deaths} sidecar hosts died in a row")

    def _give_up_stuck_pools(self) -> None:
        oldest: dict[str, Call] = {}  # by pool: the call that has waited longest
        for call in self._calls.values():
            oldest.setdefault(call.pool, call)
        for pool, first in oldest.items():
            patience = self.patience[pool] + GRACE_SECONDS
            if self._now - max(self._moved[pool], first.asked) > patience:
                calls = (call for call in self._calls.values() if call.pool == pool)
                self._fail_all(calls, "timeout", f"nothing moved at the sidecar for {patience:g} s")

    def _fail_all(self, calls: Iterable[Call], reason: str, detail: str) -> None:
        for call in calls:
            if not call.reply.done():
                self._fail(call, reason, detail)


def _warn(text: str) -> None:
    tell(f"sidecar: {text}")
