"""The sessions at a host: whose they are, what was answered last, and when nobody uses them any more.

A call that is sent again gets the answer that it got, so that no step is taken twice. The clock of episodes and leases
is the client's own: it runs while messages of the client arrive, and so stands still while a rank trains.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from spmd_rl import wire
from spmd_rl.sidecar.env_pool import EnvPool, Slot
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.types import LostReason

MAX_SESSIONS = 8 * wire.WINDOW
"""The most sessions of a client, with those that wait for their reset."""
MAX_SILENCE = 1.0
"""The clock of a client advances at most by so much between two of its messages."""
CHECK_SECONDS = 0.2
"""The pause between two looks at leases."""
QUIET_SECONDS = 1.0
"""A client that has been silent for this long is written to, which shows whether its connection still exists."""
GONE_SECONDS = 5.0
"""The sessions of a client without a connection for this long are closed."""


@dataclass(eq=False, repr=False, slots=True)
class _SessionClient:
    last_seen: float
    last_written: float = 0.0
    clock: float = 0.0
    gone_at: float | None = None
    """When its connection was found gone."""
    sessions: dict[int, "_Session"] = field(default_factory=dict)
    """By the client's own number."""
    replies: list[wire.SessionReply | wire.SessionFailure] = field(default_factory=list)
    """Replies that are not sent yet."""


@dataclass(eq=False, repr=False, slots=True)
class _Session:
    reset: wire.ResetRequest
    client: _SessionClient
    pool: EnvPool
    used: float
    """When a call came or was answered last, by the client's clock."""
    number: int = 0
    """The number of the call that came last."""
    answer: wire.SessionReply | wire.SessionFailure | None = None
    """The reply to that call; None while it runs."""
    slot: Slot | None = None
    began: float = 0.0
    failure: tuple[LostReason, str, str] | None = None
    """Why it is over, if the client has not received it."""

    @property
    def id(self) -> int:
        """The client's own number."""
        return self.reset.session

    def on_slot(self, slot: Slot) -> None:
        """Its reset begins."""
        self.slot, self.began = slot, self.client.clock

    def on_reply(self, number: int, reply: msgspec.Raw) -> None:
        """See `SlotOwner`."""
        self._answer(wire.SessionReply(self.id, number, reply.copy()))

    def on_failure(self, reason: LostReason, detail: str, traceback: str = "") -> None:
        """See `SlotOwner`. The client receives it with its next call."""
        self.slot, self.failure = None, (reason, detail, traceback)
        if self.answer is None:
            self._answer(wire.SessionFailure(self.id, self.number, *self.failure))

    def _answer(self, answer: wire.SessionReply | wire.SessionFailure) -> None:
        self.answer, self.used = answer, self.client.clock
        self.client.replies.append(answer)


class Sessions:
    """The host calls `on_requests` for each message, `on_any` for each message of any kind, `tick` in every round, and
    `unreachable` where a client has no connection. `send(peer, message)` returns False if the frame must wait."""

    def __init__(
        self,
        host: str,
        pools: Mapping[str, EnvPool],
        send: Callable[[bytes, msgspec.Struct], bool],
        loop: EventLoop,
    ) -> None:
        """`host`: the name of this host process."""
        self._host, self._pools, self._send, self._loop = host, pools, send, loop
        self._clients: dict[bytes, _SessionClient] = {}
        self._next_check = 0.0

    def __len__(self) -> int:
        return sum(len(client.sessions) for client in self._clients.values())

    @property
    def busy(self) -> bool:
        """Whether an environment works, or an answer waits."""
        return any(pool.busy for pool in self._pools.values()) or any(c.replies for c in self._clients.values())

    def on_any(self, peer: bytes) -> None:
        """Note that a client lives."""
        if client := self._clients.get(peer):
            client.clock += min(self._loop.now - client.last_seen, MAX_SILENCE)
            client.last_seen, client.gone_at = self._loop.now, None

    def unreachable(self, peer: bytes) -> None:
        """Note that a client has no connection; it may come back."""
        client = self._clients.get(peer)
        if client is not None and client.gone_at is None:
            client.gone_at = self._loop.now

    def on_requests(self, peer: bytes, message: wire.SessionRequests, draining: bool) -> None:
        """Handle calls. A host that drains begins no sessions. WireError if there are too many."""
        client = self._clients.get(peer) or _SessionClient(self._loop.now)
        for item in message.items:
            session = client.sessions.get(item.session)
            if isinstance(item, wire.CloseRequest):
                if session is not None:
                    self._close(session)
            elif isinstance(item, wire.StepRequest):
                self._on_step(client, session, item)
            elif session is not None:
                self._repeat(session, 0)
            elif not draining:
                self._clients[peer] = client
                self._on_reset(client, item)
        if client.replies:
            self._clients[peer] = client

    def tick(self) -> None:
        """Tick the pools, send answers, and close what nobody uses."""
        for pool in self._pools.values():
            pool.tick()
        for peer, client in list(self._clients.items()):
            if client.replies:
                self._send_replies(peer, client)
        if self._loop.now >= self._next_check:
            self._next_check = self._loop.now + CHECK_SECONDS
            for peer, client in list(self._clients.items()):
                self._check(peer, client)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _on_reset(self, client: _SessionClient, item: wire.ResetRequest) -> None:
        if len(client.sessions) >= MAX_SESSIONS:
            raise wire.WireError(f"more than {MAX_SESSIONS} sessions")
        pool = self._pools.get(item.env)
        if pool is None:
            detail = f"this host has no env.{item.env}"
            client.replies.append(wire.SessionFailure(item.session, 0, "error", detail))
            return
        session = _Session(item, client, pool, client.clock)
        client.sessions[item.session] = session
        pool.submit(session)

    def _on_step(self, client: _SessionClient, session: _Session | None, item: wire.StepRequest) -> None:
        if session is None:
            detail = "the host does not know the session: it was restarted, or its lease is over"
            client.replies.append(wire.SessionFailure(item.session, item.number, "lost", detail))
        elif item.number == session.number + 1 and session.answer is not None:
            session.number, session.used = item.number, client.clock
            if session.failure is not None:
                session.answer = wire.SessionFailure(item.session, item.number, *session.failure)
                client.replies.append(session.answer)
            else:
                session.answer = None
                session.pool.step(session.slot, item.number, item.action)
        else:
            self._repeat(session, item.number)

    def _repeat(self, session: _Session, number: int) -> None:
        """Answer a call that was sent again, if it has been answered."""
        if session.answer is not None and number == session.number:
            session.client.replies.append(session.answer)

    def _close(self, session: _Session) -> None:
        del session.client.sessions[session.id]
        if session.slot is not None:
            session.pool.release(session.slot)
        else:
            session.pool.withdraw(session)

    def _send_replies(self, peer: bytes, client: _SessionClient) -> None:
        while client.replies:
            size = count = 0
            while count < min(len(client.replies), wire.BATCH_ITEMS) and size < wire.BATCH_BYTES:
                answer = client.replies[count]
                size += len(memoryview(answer.reply)) if isinstance(answer, wire.SessionReply) else len(answer.detail)
                count += 1
            if not self._send(peer, wire.SessionReplies(client.replies[:count])):
                return
            del client.replies[:count]

    # -- clients and leases ---------------------------------------------------------------------------------------

    def _check(self, peer: bytes, client: _SessionClient) -> None:
        now = self._loop.now
        if client.gone_at is not None and now - client.gone_at > GONE_SECONDS:
            client.replies.clear()
            for session in list(client.sessions.values()):
                self._close(session)
        for session in list(client.sessions.values()):
            self._check_session(session)
        if not client.sessions and not client.replies:
            del self._clients[peer]
        elif now - max(client.last_seen, client.last_written) > QUIET_SECONDS:
            client.last_written = now
            self._send(peer, wire.Pong(self._host, {}))

    def _check_session(self, session: _Session) -> None:
        clock, spec = session.client.clock, session.pool.spec
        if session.slot is not None and clock - session.began > spec.episode_timeout:
            self._end(session, "timeout", f"its episode took over {spec.episode_timeout:g} s")
        elif session.answer is not None and clock - session.used > spec.lease:
            if session.failure is not None:
                del session.client.sessions[session.id]
            else:
                self._end(session, "lost", f"it was not used for {spec.lease:g} s")

    def _end(self, session: _Session, reason: LostReason, detail: str) -> None:
        """End a session before its episode is over. A call that runs is late."""
        slot, running = session.slot, session.answer is None
        session.pool.release(slot)
        if running:
            session.pool.expire(slot)
        session.used = session.client.clock
        session.on_failure(reason, detail)
