"""The sessions at a host: which client has them, and the answers that are not sent yet.

A session ends with its episode, with a failure that its client has received, and with its client.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from spmd_rl.sidecar import wire
from spmd_rl.sidecar.env_pool import EnvPool, Slot
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.types import LostReason

QUIET_SECONDS = 1.0
"""A client that has been silent for this long is written to, which shows whether its connection still exists."""


@dataclass(eq=False, repr=False, slots=True)
class _SessionClient:
    last_seen: float
    """When it last sent a message, or was written to because it was silent."""
    sessions: dict[int, "_Session"] = field(default_factory=dict)
    """Sessions by the client's own number."""
    replies: list[wire.SessionReply | wire.SessionFailure] = field(default_factory=list)
    """Replies that are not sent yet."""


@dataclass(eq=False, repr=False, slots=True)
class _Session:
    reset: wire.ResetRequest
    client: _SessionClient
    pool: EnvPool
    number: int | None = 0
    """The number of the call that runs; None between calls."""
    slot: Slot | None = None
    failure: tuple[LostReason, str, str] | None = None
    """Why it is over, if the client has not received it."""

    @property
    def id(self) -> int:
        """The client's own number."""
        return self.reset.session

    def on_slot(self, slot: Slot) -> None:
        """Its reset begins."""
        self.slot = slot

    def on_reply(self, number: int, reply: msgspec.Raw) -> None:
        """See `SlotOwner`."""
        self.number = None
        self.client.replies.append(wire.SessionReply(self.id, number, reply.copy()))

    def on_failure(self, reason: LostReason, detail: str, traceback: str = "") -> None:
        """See `SlotOwner`. Between calls, the client receives it with its next one."""
        self.slot, self.failure = None, (reason, detail, traceback)
        if self.number is not None:
            self.fail(self.number)

    def fail(self, number: int) -> None:
        """Answer a call with the failure, and forget the session."""
        self.client.replies.append(wire.SessionFailure(self.id, number, *self.failure))
        self.client.sessions.pop(self.id, None)


class Sessions:
    """The host calls `on_requests` for each message, `on_any` for each message of any kind, `tick` in every round, and
    `unreachable` where a client has no connection. `send(peer, message)` returns False if the frame must wait."""

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
        """Note that a client lives."""
        if client := self._clients.get(peer):
            client.last_seen = self._loop.now

    def unreachable(self, peer: bytes) -> None:
        """Close the sessions of a client whose connection is gone: it opens others."""
        if client := self._clients.pop(peer, None):
            client.replies.clear()
            for session in list(client.sessions.values()):
                self._close(session)

    def on_requests(self, peer: bytes, message: wire.SessionRequests, draining: bool) -> None:
        """Handle calls. A host that drains begins no sessions. WireError for a call that is out of turn."""
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
        """Tick the pools, send answers, and find clients that are gone."""
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
