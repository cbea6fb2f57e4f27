"""The sessions at a host: their clients, and unsent replies.

A session ends with its episode, with a failure that its client has received, or with its client.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from spmd_rl.sidecar import wire
from spmd_rl.sidecar.env_pool import EnvPool, Slot
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.types import LostReason

QUIET_SECONDS = 1.0
"""Silence after which a client is pinged, to learn if its connection exists."""


@dataclass(eq=False, repr=False, slots=True)
class _SessionClient:
    last_seen: float
    sessions: dict[int, "_Session"] = field(default_factory=dict)
    replies: list[wire.SessionReply | wire.SessionFailure] = field(default_factory=list)


@dataclass(eq=False, repr=False, slots=True)
class _Session:
    reset: wire.ResetRequest
    client: _SessionClient
    pool: EnvPool
    number: int | None = 0
    """Running call; None between calls."""
    slot: Slot | None = None
    failure: tuple[LostReason, str, str] | None = None
    """Reason of its end, until the client has received it."""

    @property
    def id(self) -> int:
        return self.reset.session

    def on_slot(self, slot: Slot) -> None:
        self.slot = slot

    def on_reply(self, number: int, reply: msgspec.Raw) -> None:
        self.number = None
        self.client.replies.append(wire.SessionReply(self.id, number, reply.copy()))

    def on_failure(self, reason: LostReason, detail: str, traceback: str = "") -> None:
        """See `SlotOwner`. Between calls, the failure answers the client's next call."""
        self.slot, self.failure = None, (reason, detail, traceback)
        if self.number is not None:
            self.fail(self.number)

    def fail(self, number: int) -> None:
        self.client.replies.append(wire.SessionFailure(self.id, number, *self.failure))
        self.client.sessions.pop(self.id, None)


class Sessions:
    """Sessions of a host's clients.

    The host calls `on_requests` and `on_any` for messages, `tick` in every round, and `unreachable` if a client has no
    connection. `send(peer, message)` returns False if the frame must wait.
    """

    def __init__(
        self, pools: Mapping[str, EnvPool], send: Callable[[bytes, msgspec.Struct], bool], loop: EventLoop
    ) -> None:
        self._pools, self._send, self._loop = pools, send, loop
        self._clients: dict[bytes, _SessionClient] = {}

    def __len__(self) -> int:
        return sum(len(client.sessions) for client in self._clients.values())

    @property
    def busy(self) -> bool:
        """True if an environment works, or an answer waits."""
        return any(pool.busy for pool in self._pools.values()) or any(c.replies for c in self._clients.values())

    def on_any(self, peer: bytes) -> None:
        """Note that a client is alive."""
        if client := self._clients.get(peer):
            client.last_seen = self._loop.now

    def unreachable(self, peer: bytes) -> None:
        """Close the sessions of a disconnected client."""
        if client := self._clients.pop(peer, None):
            client.replies.clear()
            for session in list(client.sessions.values()):
                self._close(session)

    def on_requests(self, peer: bytes, message: wire.SessionRequests, draining: bool) -> None:
        """Handle calls. A draining host begins no sessions. WireError for a call out of turn."""
        client = self._clients.setdefault(peer, _SessionClient(self._loop.now))
        for item in message.items:
            session = client.sessions.get(item.session)
            if isinstance(item, wire.CloseRequest):
                if session is not None:
                    self._close(session)
            elif isinstance(item, wire.StepRequest):
                self._on_step(client, session, item)
            elif session is not None:
                raise wire.WireError(f"session {item.session} is open")
            elif not draining:
                self._on_reset(client, item)

    def tick(self) -> None:
        """Tick the pools, send answers, and find lost clients."""
        for pool in self._pools.values():
            pool.tick()
        for peer, client in list(self._clients.items()):
            if client.replies:
                self._send_replies(peer, client)
            if not client.sessions and not client.replies:
                self._clients.pop(peer, None)
            elif self._loop.now - client.last_seen > QUIET_SECONDS:
                client.last_seen = self._loop.now
                self._send(peer, wire.SessionReplies([]))

    def _on_reset(self, client: _SessionClient, item: wire.ResetRequest) -> None:
        pool = self._pools.get(item.env)
        if pool is None:
            detail = f"this host has no env.{item.env}"
            client.replies.append(wire.SessionFailure(item.session, 0, "error", detail))
            return
        client.sessions[item.session] = session = _Session(item, client, pool)
        pool.submit(session)

    def _on_step(self, client: _SessionClient, session: _Session | None, item: wire.StepRequest) -> None:
        if session is None:
            detail = "the host does not know the session"
            client.replies.append(wire.SessionFailure(item.session, item.number, "lost", detail))
        elif session.number is not None:
            raise wire.WireError(f"session {item.session} has a call under way")
        elif session.failure is not None:
            session.fail(item.number)
        else:
            session.number = item.number
            session.pool.step(session.slot, item.number, item.action)

    def _close(self, session: _Session) -> None:
        session.client.sessions.pop(session.id, None)
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
