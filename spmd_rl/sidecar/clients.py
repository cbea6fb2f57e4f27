"""A rank's clients of sidecars: verdicts, and sessions with environments."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from spmd_rl.base.curve_keys import ClientKeys
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.host_client import Call, HostClient, HostLink
from spmd_rl.sidecar.launcher import HostProcess
from spmd_rl.types import AnswerInfo, EnvReply, Prompt, SessionLost, Verdict


class ScoreClient(HostClient):
    """A `Scorer` over connections to hosts."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeouts: Mapping[str, float],
        specs: Mapping[str, str],
        host: HostProcess | None,
        keys: ClientKeys | None = None,
    ) -> None:
        """timeouts: seconds of a rewarder, by domain. Others: see `HostClient`."""
        super().__init__(addresses, timeouts, specs, host, keys)
        self._timeouts = dict(timeouts)

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Judge one answer. Failures are verdicts; cancelling it cancels the request."""
        timeout = self._timeouts.get(prompt.domain)
        if timeout is None:
            return Verdict("error", detail=f"no reward.{prompt.domain} is set")
        try:
            packed = wire.pack(wire.ScoreInput(prompt, answer, info))
        except wire.WireError as error:
            return Verdict("error", detail=str(error))
        if (size := len(memoryview(packed))) > wire.MAX_INPUT_BYTES:
            return Verdict("rejected", detail=f"{size} bytes of prompt and answer; the limit is {wire.MAX_INPUT_BYTES}")
        id_ = next(self.ids)
        return await self.request(id_, prompt.domain, wire.ScoreRequest(id_, prompt.domain, timeout, packed), size)

    def _message(self, calls: list[Call]) -> wire.ScoreRequests:
        return wire.ScoreRequests([call.request for call in calls])

    def _cancel(self, call: Call) -> None:
        call.link.send(wire.CancelScores([call.id]))

    def _on_replies(self, link: HostLink, message: wire.ScoreReplies) -> None:
        for item in message.items:
            if (call := self.open_call(item.id)) is not None:
                self.settle(call, item.verdict)

    def _fail(self, call: Call, reason: str, detail: str) -> None:
        call.reply.set_result(Verdict(reason, detail=detail))


class OpenSession:
    """A `Session` over two callables."""

    def __init__(
        self,
        id_: int,
        tag: str,
        reply: EnvReply,
        play: Callable[[wire.StepRequest], Awaitable[EnvReply]],
        end: Callable[[], object],
    ) -> None:
        """play: raises SessionLost if the environment fails. end: called once; returns at once."""
        self.tag = tag
        self.reply = reply
        self._id, self._play, self._end = id_, play, end
        self._number = 0
        self._lost: SessionLost | None = None
        self._closed = False

    async def step(self, action: str) -> EnvReply:
        """See `Session`. One step at a time; cancelling a step closes the session."""
        assert not self._closed, "the session is closed"
        if self._lost is not None:
            raise self._lost
        self._number += 1
        try:
            self.reply = await self._play(wire.StepRequest(self._id, self._number, action))
        except SessionLost as error:
            self._lost = error
            raise
        return self.reply

    async def close(self) -> None:
        """See `Session`."""
        if not self._closed:
            self._closed = True
            self._end()


class RemoteEnvironments(HostClient):
    """`Environments` over connections to hosts. A session stays with its reset's host."""

    def __init__(
        self,
        addresses: Sequence[str],
        episode_timeouts: Mapping[str, float],
        specs: Mapping[str, str],
        host: HostProcess | None,
        keys: ClientKeys | None = None,
    ) -> None:
        """episode_timeouts: seconds, by tag. Others: see `HostClient`."""
        super().__init__(addresses, {f"env.{tag}": t for tag, t in episode_timeouts.items()}, specs, host, keys)
        self._sessions: dict[int, HostLink] = {}

    async def reset(self, tag: str, seed: int, held_out: bool = False, solve: bool = False) -> OpenSession:
        """See `Environments`. Cancelling it ends the session."""
        pool, id_ = f"env.{tag}", next(self.ids)
        if pool not in self.patience:
            raise SessionLost("error", f"no env.{tag} is set")
        try:
            reply = await self.request(id_, pool, wire.ResetRequest(id_, tag, seed, held_out, solve), 0)
        except asyncio.CancelledError:
            # The host may have begun the session already; without this it would keep its slot.
            self._end(id_, pool)
            raise
        if isinstance(reply, SessionLost):
            raise reply
        return OpenSession(id_, tag, reply, partial(self._step, pool, self.now), partial(self._end, id_, pool))

    async def _step(self, pool: str, began: float, request: wire.StepRequest) -> EnvReply:
        if (link := self._sessions.get(request.session)) is None:
            raise SessionLost("lost", "its sidecar host is gone")
        if self.now - began > self.patience[pool]:
            raise SessionLost("timeout", f"its episode took longer than {self.patience[pool]:g} s")
        try:
            size = len(memoryview(wire.pack(request.action)))
        except wire.WireError as error:
            raise SessionLost("error", f"the action {error}") from None
        if size > wire.MAX_ACTION_BYTES:
            raise SessionLost("error", f"the action has {size} bytes; at most {wire.MAX_ACTION_BYTES}")
        reply = await self.request(request.session, pool, request, size, link)
        if isinstance(reply, SessionLost):
            raise reply
        return reply

    def _end(self, id_: int, pool: str) -> None:
        if (link := self._sessions.pop(id_, None)) is not None:
            link.load[pool] -= 1
            self._close(link, id_, pool)

    def _close(self, link: HostLink, id_: int, pool: str) -> None:
        link.unsent.append(Call(id_, pool, wire.CloseRequest(id_), 0, None))
        self.flush_soon()

    def _message(self, calls: list[Call]) -> wire.SessionRequests:
        return wire.SessionRequests([call.request for call in calls])

    def _cancel(self, call: Call) -> None:
        if call.waits:
            self._close(call.link, call.id, call.pool)
        else:
            self._end(call.id, call.pool)

    def _on_gone(self, link: HostLink) -> None:
        self._sessions = {id_: other for id_, other in self._sessions.items() if other is not link}

    def _on_replies(self, link: HostLink, message: wire.SessionReplies) -> None:
        for item in message.items:
            if (call := self.open_call(item.session)) is None:
                continue  # cancelled
            outcome = _outcome(item)
            if call.waits and isinstance(outcome, EnvReply):
                self._sessions[item.session] = link
                link.load[call.pool] += 1
            self.settle(call, outcome)

    def _fail(self, call: Call, reason: str, detail: str) -> None:
        call.reply.set_result(SessionLost("timeout" if reason == "timeout" else "lost", detail))


def _outcome(item: wire.SessionReply | wire.SessionFailure) -> EnvReply | SessionLost:
    if isinstance(item, wire.SessionFailure):
        return SessionLost(item.reason, item.detail, item.traceback)
    try:
        return wire.ENV_REPLY.unpack(item.reply)
    except wire.WireError as error:
        return SessionLost("error", f"its reply is {error}")
