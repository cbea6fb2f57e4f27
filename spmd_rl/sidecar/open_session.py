"""`OpenSession`: one episode of an environment, as its player sees it, wherever the environment runs."""

from collections.abc import Awaitable, Callable

from spmd_rl import wire
from spmd_rl.types import EnvReply, SessionLost


class OpenSession:
    """A `Session` made of how to play a call, and of what to do when it is over."""

    def __init__(
        self,
        id_: int,
        tag: str,
        reply: EnvReply,
        play: Callable[[wire.StepRequest], Awaitable[EnvReply]],
        end: Callable[[], object],
    ) -> None:
        """`play` raises SessionLost if the environment fails; `end` is called once and does not wait."""
        self.tag = tag
        self.reply = reply
        self._id, self._play, self._end = id_, play, end
        self._number = 0
        self._lost: SessionLost | None = None
        self._closed = False

    async def step(self, action: str) -> EnvReply:
        """See `Session`. One step at a time; a step that is cancelled closes the session."""
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
