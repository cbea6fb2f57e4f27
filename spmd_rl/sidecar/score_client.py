"""A rank's side of the score protocol: a request is sent again until its verdict is there.

The verdicts are those of a run in which nothing happened to a host or a worker.
"""

from collections.abc import Mapping

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys
from spmd_rl.sidecar.host_client import Call, HostClient
from spmd_rl.sidecar.launcher import HostProcess
from spmd_rl.types import AnswerInfo, Prompt, Verdict


class ScoreClient(HostClient):
    """A `Scorer` over one connection."""

    def __init__(
        self, address: str, timeouts: Mapping[str, float], host: HostProcess | None, keys: ClientKeys | None = None
    ) -> None:
        """`timeouts` holds the seconds that a rewarder may take, by domain."""
        super().__init__(address, timeouts, host, keys)
        self._timeouts = dict(timeouts)

    async def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Judge one answer. Never raises for a sample's or a sidecar's failure; cancelling it cancels the request."""
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

    def _cancellation(self, id_: int) -> wire.CancelScores:
        return wire.CancelScores([id_])

    def _on_replies(self, message: wire.ScoreReplies) -> None:
        for item in message.items:
            if (call := self.open_call(item.id)) is not None:
                self.settle(call, item.verdict)

    def _fail(self, call: Call, reason: str, detail: str) -> None:
        call.reply.set_result(Verdict(reason, detail=detail))
