"""The session protocol: an episode of an environment, which lives with one worker from its reset to its close.

A client numbers its sessions, and the calls of a session: its reset is call 0, then come its steps. A call is sent
once, and the next one after its answer. A session that the host does not know is lost.
"""

from typing import Annotated

import msgspec

from spmd_rl.types import LostReason
from spmd_rl.wire.base import Id, Many, Name, WireMessage


class ResetRequest(WireMessage, tag="reset"):
    """Client to host: begin a session. Host to worker: begin an episode in this slot."""

    session: Id
    env: Name
    """The tag of the environment."""
    seed: Annotated[int, msgspec.Meta(ge=0)]
    """At most 64 bits."""
    held_out: bool = False
    """Whether the environment is built with its `eval_args`."""
    solve: bool = False
    """Whether each reply of the episode has the environment's `solution()` as `info["solution"]`."""


class StepRequest(WireMessage, tag="step"):
    """Client to host, host to worker: take one step."""

    session: Id
    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    """1 for the first step after the reset."""
    action: str


class CloseRequest(WireMessage, tag="close"):
    """Client to host: the session is over. Without a reply."""

    session: Id


class SessionRequests(WireMessage, tag="session_requests"):
    """Client to host, host to worker."""

    items: Annotated[list[ResetRequest | StepRequest | CloseRequest], Many]


class SessionReply(WireMessage, tag="session_reply"):
    """What the environment returned from one call."""

    session: Id
    number: Id
    reply: msgspec.Raw
    """An encoded `EnvReply`."""


class SessionFailure(WireMessage, tag="session_failure"):
    """The answer to a call of a session that is over."""

    session: Id
    number: Id
    reason: LostReason
    detail: str
    """One line."""
    traceback: str = ""


class SessionReplies(WireMessage, tag="session_replies"):
    """Worker to host, host to client: answers to `SessionRequests`, in any order."""

    items: list[SessionReply | SessionFailure]
