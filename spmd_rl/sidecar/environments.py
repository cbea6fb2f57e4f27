"""A rank's side of the session protocol: environments that run in a sidecar.

session = await environments.reset("frozen_lake", seed=7)
while not session.reply.done:
    await session.step(act(session.reply.observation))
await session.close()
"""

from collections import deque
from collections.abc import Mapping
from functools import partial

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys
from spmd_rl.sidecar.host_client import Call, HostClient
from spmd_rl.sidecar.launcher import HostProcess
from spmd_rl.sidecar.open_session import OpenSession
from spmd_rl.types import EnvReply, SessionLost


class RemoteEnvironments(HostClient):
    """`Environments` over one connection to the node's host."""

    def __init__(
        self, address: str, patience: Mapping[str, float], host: HostProcess | None, keys: ClientKeys | None = None
    ) -> None:
        """`patience`: by tag, the seconds for which a call may wait while nothing else moves: those of an episode."""
        super().__init__(address, {f"env.{tag}": seconds for tag, seconds in patience.items()}, host, keys)
        self._ended: deque[int] = deque()

    async def reset(self, tag: str, seed: int, held_out: bool = False, solve: bool = False) -> OpenSession:
        """See `Environments`. Cancelling it ends the session."""
        if f"env.{tag}" not in self.patience:
            raise SessionLost("error", f"no env.{tag} is set")
        id_ = next(self.ids)
        try:
            reply = await self.call(id_, tag, wire.ResetRequest(id_, tag, seed, held_out, solve))
        except SessionLost:
            self.end(id_)
            raise
        return OpenSession(id_, tag, reply, partial(self.call, id_, tag), partial(self.end, id_))

    async def call(self, id_: int, tag: str, request: wire.ResetRequest | wire.StepRequest) -> EnvReply:
        """Make one call of a session and wait for its reply. SessionLost if there is none."""
        size = 0
        if isinstance(request, wire.StepRequest):
            try:
                size = len(memoryview(wire.pack(request.action)))
            except wire.WireError as error:
                raise SessionLost("error", f"the action {error}") from None
            if size > wire.MAX_ACTION_BYTES:
                raise SessionLost("error", f"the action has {size} bytes; at most {wire.MAX_ACTION_BYTES}")
        waits = isinstance(request, wire.ResetRequest)
        reply = await self.request(id_, f"env.{tag}", request, size, waits=waits)
        if isinstance(reply, SessionLost):
            raise reply
        return reply

    def end(self, id_: int) -> None:
        """Report to the host that a session is over, with the next calls or within a moment."""
        self._ended.append(id_)
        self.wake()

    def _before_flush(self) -> None:
        while self._ended:
            ids = [self._ended.popleft() for _ in range(min(len(self._ended), wire.BATCH_ITEMS))]
            if not self.send(wire.SessionRequests([wire.CloseRequest(id_) for id_ in ids])):
                self._ended.extendleft(reversed(ids))
                break

    def _message(self, calls: list[Call]) -> wire.SessionRequests:
        return wire.SessionRequests([call.request for call in calls])

    def _cancellation(self, id_: int) -> wire.SessionRequests:
        return wire.SessionRequests([wire.CloseRequest(id_)])

    def _on_replies(self, message: wire.SessionReplies) -> None:
        for item in message.items:
            call = self.open_call(item.session)
            if call is not None and item.number == getattr(call.request, "number", 0):
                self.settle(call, _outcome(item))

    def _fail(self, call: Call, reason: str, detail: str) -> None:
        call.reply.set_result(SessionLost("timeout" if reason == "timeout" else "lost", detail))


def _outcome(item: wire.SessionReply | wire.SessionFailure) -> EnvReply | SessionLost:
    if isinstance(item, wire.SessionFailure):
        return SessionLost(item.reason, item.detail, item.traceback)
    try:
        return wire.ENV_REPLY.unpack(item.reply)
    except wire.WireError as error:
        return SessionLost("error", f"its reply is {error}")
