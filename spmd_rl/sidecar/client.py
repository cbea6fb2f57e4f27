"""A rank's side of the sidecar: thousands of answers under way at once, each with a verdict in the end.

Whatever happens to a host or a worker, a question is sent again under its old id until its verdict is there; the
verdicts are those of a run in which nothing happened. All clocks count only time in which the event loop ran: a rank
that computes for a minute does not take its sidecar for dead. Not thread-safe; one event loop at a time.
"""

import asyncio
import contextlib
import itertools
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec
import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys, bound
from spmd_rl.sidecar.launcher import HostProcess
from spmd_rl.types import AnswerInfo, Prompt, Verdict

TICK_SECONDS = 0.1
"""Between two looks at the host."""
WATCH_SECONDS = 0.25
"""The same while nothing is outstanding."""
LEASE_SECONDS = 5.0
"""A host that lives but has been silent for so long is replaced."""
START_SECONDS = 30.0
"""The same for one that was just started."""
RESEND_SECONDS = 5.0
"""A question without a verdict is sent again; the host knows it, unless it was lost on the way."""
GRACE_SECONDS = 20.0
"""A domain in which nothing has moved for its timeout and this is given up: `timeout` verdicts."""
PROMPTS = 256
"""Packed prompts held at once, at most."""
READABLE = int(zmq.POLLIN)
"""A plain number: pyzmq's flag would make another flag of each comparison."""
MAX_DEATHS = 5
"""So many dead hosts in a row, without a verdict between, and what is under way gets `error`."""


class _Call(msgspec.Struct, eq=False):
    domain: str
    score: wire.Score
    num_bytes: int
    verdict: asyncio.Future
    asked: float
    sent: float | None = None


class Client:
    """A `Scorer` over one DEALER socket. `host` is this rank's to look after, or None if another rank does.

    The socket is in the event loop only while calls are outstanding, so that one client serves many loops in turn.
    """

    def __init__(
        self, address: str, timeouts: Mapping[str, float], host: HostProcess | None, keys: ClientKeys | None = None
    ) -> None:
        self._timeouts = dict(timeouts)
        self._host = host
        self._context = zmq.Context()
        self._socket = _dealer(self._context, address, keys)
        self._ids = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._prompts: dict[int, tuple[Prompt, msgspec.Raw]] = {}
        """packed, by identity; while calls are outstanding"""
        self._outbox: deque[int] = deque()
        self._frame = bytearray(1)
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._moved = dict.fromkeys(self._timeouts, 0.0)  # by domain: when it last moved
        self._beats: dict[str, int] = {}
        self._name = ""  # of the host that answers
        self._deaths = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flushing = False
        self._ran = 0.0  # seconds in which the loop ran while we were in it
        self._ticked = 0.0
        self._patient_until = LEASE_SECONDS
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watch_over, args=(host,), name="sidecar watch", daemon=True)
        if host is not None:
            self._watch.start()

    @property
    def outstanding(self) -> int:
        """Answers whose verdict is not there yet."""
        return len(self._calls)

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Judge one answer. Never raises for a sample's or a sidecar's failure; a cancelled call is called off."""
        timeout = self._timeouts.get(prompt.domain)
        if timeout is None:
            return Verdict("error", detail=f"no reward.{prompt.domain} is set")
        try:
            question = wire.pack(wire.RawQuestion(self._packed(prompt), answer, info))
        except wire.WireError as error:
            return Verdict("error", detail=str(error))
        num_bytes = len(memoryview(question))
        if num_bytes > wire.MAX_QUESTION_BYTES:
            return Verdict("rejected", detail=f"{num_bytes} bytes of prompt and answer; {wire.MAX_QUESTION_BYTES} fit")
        self._attach()
        id_ = next(self._ids)
        score = wire.Score(id_, prompt.domain, timeout, question)
        call = self._calls[id_] = _Call(prompt.domain, score, num_bytes, self._loop.create_future(), self._ran)
        self._outbox.append(id_)
        self._flush_soon()
        try:
            return await call.verdict
        finally:
            self._leave(id_)

    def _packed(self, prompt: Prompt) -> msgspec.Raw:
        """The answers of a group come with the very same prompt, which may be long."""
        if (held := self._prompts.get(id(prompt))) is None:
            if len(self._prompts) >= PROMPTS:
                self._prompts.clear()
            held = self._prompts[id(prompt)] = prompt, wire.pack(prompt)  # while it is held, nothing else has its id
        return held[1]

    def close(self) -> None:
        """Hang up, and end the host if it is ours. Calls still outstanding are cancelled."""
        self._closed.set()
        if self._host is not None:
            self._watch.join()
        calls, self._calls = self._calls, {}
        if self._loop is not None and not self._loop.is_closed():
            for call in calls.values():
                call.verdict.cancel()
        self._detach()
        self._context.destroy(linger=0)
        if self._host is not None:
            self._host.stop()

    # -- in and out of the loop -----------------------------------------------------------------------------------

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        assert self._loop is None, "a sidecar client serves one event loop at a time"
        self._loop = loop
        loop.add_reader(self._socket.FD, self._read)
        self._ticked = time.monotonic()
        self._timer = loop.call_soon(self._tick)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.FD)
            self._timer.cancel()
        self._loop = self._timer = None
        self._flushing = False
        self._patient_until = self._ran + LEASE_SECONDS  # silence while nobody asks means nothing

    def _leave(self, id_: int) -> None:
        """The call is over: answered, given up or cancelled."""
        if (call := self._calls.pop(id_, None)) is None:
            return  # closed
        if call.sent is not None:
            self._landed(call)
            if call.verdict.cancelled():
                self._send(wire.Drop([id_]))
        if self._calls:
            self._flush_soon()
        else:
            self._outbox.clear()
            self._prompts.clear()
            self._detach()

    def _landed(self, call: _Call) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= call.num_bytes
        call.sent = None

    # -- sending --------------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        """Once in this round of the loop, so that what is asked together travels together."""
        if not self._flushing and self._outbox and not self._loop.is_closed():
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        while self._loop is not None and (batch := self._next_batch()):
            if not self._send(wire.Scores([call.score for call in batch])):
                for call in reversed(batch):
                    self._landed(call)
                    self._outbox.appendleft(call.score.id)
                break
        self._read()  # the descriptor tells of changes only, and sending may have swallowed one

    def _next_batch(self) -> list[_Call]:
        batch, size = [], 0
        while self._outbox and len(batch) < wire.BATCH_ITEMS and size < wire.BATCH_BYTES:
            if self._in_flight >= wire.WINDOW or self._in_flight_bytes >= wire.WINDOW_BYTES:
                break
            call = self._calls.get(self._outbox.popleft())
            if call is None or call.verdict.done() or call.sent is not None:
                continue
            call.sent = self._ran
            self._in_flight += 1
            self._in_flight_bytes += call.num_bytes
            size += call.num_bytes
            batch.append(call)
        return batch

    def _send(self, message: wire.Scores | wire.Drop | wire.Ping) -> bool:
        try:
            self._socket.send(wire.encode(message, self._frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # -- receiving ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        # To look costs a tenth of being refused: pyzmq's exception spells itself out.
        while self._loop is not None and self._socket.get(zmq.EVENTS) & READABLE:
            try:
                message = wire.TO_CLIENT.decode(self._socket.recv(zmq.NOBLOCK))
            except wire.WireError as error:
                _warn(f"a frame from the host was {error}")
                continue
            self._patient_until = self._ran + LEASE_SECONDS
            if isinstance(message, wire.Verdicts):
                self._deaths = 0
                for item in message.items:
                    self._answer(item.id, item.verdict)
            elif isinstance(message, wire.Pong):
                self._heed(message)
            else:
                _warn(f"the host refused a frame: {message.detail}")

    def _answer(self, id_: int, verdict: Verdict) -> None:
        call = self._calls.get(id_)
        if call is not None and not call.verdict.done():
            call.verdict.set_result(verdict)
            self._moved[call.domain] = self._ran

    def _heed(self, pong: wire.Pong) -> None:
        for domain, beat in pong.beats.items():
            if self._beats.get(domain) != beat:
                self._beats[domain] = beat
                self._moved[domain] = self._ran
        if self._name and pong.host != self._name:
            self._resend(older_than=0.0)
        self._name = pong.host

    # -- looking after it all -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        self._ran += min(now - self._ticked, 2 * TICK_SECONDS)
        self._ticked = now
        self._read()
        if self._loop is None:
            return
        if self._host is not None:
            self._look_after(self._host)
        self._resend(older_than=RESEND_SECONDS)
        self._give_up()
        self._send(wire.Ping())
        self._flush()
        if self._loop is not None:
            self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    def _watch_over(self, host: HostProcess) -> None:
        """On a thread: while nothing is outstanding here, and perhaps no loop runs, other ranks may need the host."""
        pause = WATCH_SECONDS
        while not self._closed.wait(pause):
            if host.alive or self._loop is not None:
                pause = WATCH_SECONDS
                continue
            _warn("the host died; starting a new one")
            with contextlib.suppress(OSError):  # tried again later
                host.restart()
            pause = min(2 * pause, LEASE_SECONDS)

    def _look_after(self, host: HostProcess) -> None:
        if host.alive and self._ran <= self._patient_until:
            return
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            self._fail(self._calls.values(), Verdict("error", detail=f"{self._deaths} sidecar hosts died in a row"))
        _warn("the host is stuck; starting a new one" if host.alive else "the host died; starting a new one")
        try:
            host.restart()
        except OSError as error:  # out of processes or memory: tried again at the next tick
            _warn(f"no new host: {error}")
        self._name = self._name or "the first host"
        self._patient_until = self._ran + START_SECONDS

    def _resend(self, older_than: float) -> None:
        for id_, call in self._calls.items():
            if call.sent is not None and not call.verdict.done() and self._ran - call.sent >= older_than:
                self._landed(call)
                self._outbox.append(id_)
        self._flush_soon()

    def _give_up(self) -> None:
        longest: dict[str, _Call] = {}  # by domain: the call that has waited longest
        for call in self._calls.values():
            longest.setdefault(call.domain, call)
        for domain, first in longest.items():
            patience = self._timeouts[domain] + GRACE_SECONDS
            if self._ran - max(self._moved[domain], first.asked) > patience:
                calls = (call for call in self._calls.values() if call.domain == domain)
                self._fail(calls, Verdict("timeout", detail=f"nothing moved at the sidecar for {patience:g} s"))

    def _fail(self, calls: Iterable[_Call], verdict: Verdict) -> None:
        for call in calls:
            if not call.verdict.done():
                call.verdict.set_result(verdict)


def _dealer(context: zmq.Context, address: str, keys: ClientKeys | None) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))  # the same client after every reconnect
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, wire.WINDOW)
    socket.setsockopt(zmq.RCVHWM, 4 * wire.WINDOW)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    bound(socket, address)
    if keys is not None:
        keys.secure(socket)
    socket.connect(address)
    return socket


def _warn(text: str) -> None:
    print(f"sidecar: {text}", file=sys.stderr, flush=True)
