"""The messages of the sidecar: schemas, encoding and limits.

Ranks, hosts and workers speak the *score protocol*: a `ScoreRequest` asks for one verdict, a `ScoreReply` carries it.
Requests are stateless, so any worker may judge one again. Environments use the *session protocol*: a session stays with
one worker from its reset to its close. A client numbers its sessions, and their calls: the reset is call 0. The next
call is sent after an answer.

A frame is one version byte followed by a msgpack array `[tag, field, ...]`, which is checked against the structs below.
Frames are bounded in size and never pickled. Malformed bytes raise `WireError`.

    frame = wire.encode(wire.Ping())
    message = wire.TO_HOST.decode(frame)
"""

from functools import reduce
from operator import or_
from typing import Annotated, Any

import msgspec
from msgspec import field

from spmd_rl.types import AnswerInfo, EnvReply, LostReason, Prompt, Verdict

VERSION = 3
MAX_FRAME_BYTES = 10 << 20
MAX_INPUT_BYTES = 8 << 20
"""Limit of a `ScoreInput`; larger ones are rejected as a verdict."""
BATCH_ITEMS, BATCH_BYTES = 256, 1 << 20
WINDOW, WINDOW_BYTES = 2048, 64 << 20
"""Limits of a client's requests in flight at a host; others wait in the client."""
MAX_ACTION_BYTES = 1 << 20
MAX_ENV_REPLY_BYTES = 2 << 20
MAX_TIMEOUT = 86_400.0


class WireError(ValueError):
    """Error for bytes of another version or schema, or an unencodable message."""


class WireMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """A message or part of one: an array on the wire, without unknown fields."""


Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
Many = msgspec.Meta(max_length=8 * WINDOW)

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as a frame. WireError if unencodable or too large."""
    frame = bytes((VERSION,)) + pack(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return frame


def pack(value: Any) -> msgspec.Raw:
    """Encode a part of a later frame. WireError if unencodable (an object, a lone surrogate...)."""
    try:
        return msgspec.Raw(_encoder.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot be sent: {error}") from None


class Codec:
    """Decoder of one kind of receiver's frames."""

    def __init__(self, *messages: type) -> None:
        self._decoder = msgspec.msgpack.Decoder(reduce(or_, messages))

    def decode(self, frame: bytes) -> Any:
        """Decode the message in a frame. All errors are WireError."""
        if not frame or frame[0] != VERSION:
            raise WireError(f"frame version {frame[0] if frame else 'missing'}, ours is {VERSION}")
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        return self.unpack(memoryview(frame)[1:])

    def unpack(self, body: Any) -> Any:
        """Decode a part that `pack` encoded. WireError as in `decode`."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise WireError(f"not understood: {error}") from None


class ScoreInput(WireMessage):
    """Arguments of a rewarder's `score`; only the worker decodes them."""

    prompt: Prompt
    answer: str
    info: AnswerInfo


class ScoreRequest(WireMessage):
    """A request for one verdict."""

    id: Id
    domain: Name
    timeout: Seconds
    """Limit of the rewarder; waiting for a worker does not count."""
    input: msgspec.Raw


class ScoreRequests(WireMessage, tag="score_requests"):
    """Client to host, host to worker."""

    items: Annotated[list[ScoreRequest], Many]


class ScoreReply(WireMessage):
    """Verdict of one `ScoreRequest`."""

    id: Id
    verdict: Verdict


class ScoreReplies(WireMessage, tag="score_replies"):
    """Replies to `ScoreRequests`, in any order. A `sync` worker replies before its next request."""

    items: list[ScoreReply]


class CancelScores(WireMessage, tag="cancel_scores"):
    """Client to host: cancel these requests."""

    ids: Annotated[list[Id], Many]


class ResetRequest(WireMessage, tag="reset"):
    """Client to host: start a session. Host to worker: start an episode."""

    session: Id
    """Between client and host the client's number, between host and worker the slot's index."""
    env: Name
    seed: Annotated[int, msgspec.Meta(ge=0)]
    """At most 64 bits."""
    held_out: bool = False
    """True to build with `eval_args`."""
    solve: bool = False
    """True to add `solution()` as `info["solution"]` to each reply."""


class StepRequest(WireMessage, tag="step"):
    """Client to host, host to worker: take one step."""

    session: Id
    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    """Counted from 1 after the reset."""
    action: str


class CloseRequest(WireMessage, tag="close"):
    """Client to host: close the session; without a reply."""

    session: Id


class SessionRequests(WireMessage, tag="session_requests"):
    """Client to host, host to worker."""

    items: Annotated[list[ResetRequest | StepRequest | CloseRequest], Many]


class SessionReply(WireMessage, tag="session_reply"):
    """Return value of an environment for one call."""

    session: Id
    number: Id
    reply: msgspec.Raw


class SessionFailure(WireMessage, tag="session_failure"):
    """Reply to a call that failed, or came after the session's end."""

    session: Id
    number: Id
    reason: LostReason
    detail: str
    traceback: str = ""


class SessionReplies(WireMessage, tag="session_replies"):
    """Worker to host, host to client: replies to `SessionRequests`, in any order."""

    items: list[SessionReply | SessionFailure]


class PoolSpec(WireMessage, tag="rewarder"):
    """Settings of a domain's workers."""

    target: str
    args: dict[str, Any]
    workers: int
    sandbox: str = "auto"
    cpus: list[int] = field(default_factory=list)
    """Empty: all processors."""
    start_seconds: float = 300.0
    url: str = ""
    """Address of the domain's server, if any."""
    packages: list[str] = field(default_factory=list)
    """Packages for the code of answers in the sandbox."""


class EnvPoolSpec(WireMessage, tag="environment"):
    """Settings of an environment's workers."""

    target: str
    args: dict[str, Any]
    workers: int
    slots: int = 1
    """Concurrent episodes of a process, a thread each; a single one runs in the main thread."""
    eval_args: dict[str, Any] = field(default_factory=dict)
    """Replacements of `args` in held-out episodes."""
    reset_timeout: Seconds = 60.0
    step_timeout: Seconds = 30.0
    memory_mb: int = 0
    """Memory beyond its imports; 0: no limit."""
    recycle_after: int = 0
    """Episodes until a worker is replaced; 0: never."""
    sandbox: str = "auto"
    packages: list[str] = field(default_factory=list)
    cpus: list[int] = field(default_factory=list)
    start_seconds: float = 300.0


class ServerSpec(WireMessage):
    """A server that the host starts for one domain, such as a judge."""

    command: list[str]
    """`{port}` in it is replaced."""
    devices: str
    """Value of CUDA_VISIBLE_DEVICES; empty: none."""
    start_seconds: float
    """Time until the server must answer."""


class StartHost(WireMessage, tag="start_host"):
    """Rank to the host that it starts."""

    parent: int
    """Process id that the host must not outlive; 0 if the closing socket suffices."""
    address: str
    pools: dict[str, PoolSpec]
    servers: dict[str, ServerSpec] = field(default_factory=dict)
    keys: str = ""
    """Directory of CURVE keys; empty: only this machine is served."""
    envs: dict[str, EnvPoolSpec] = field(default_factory=dict)


class StartForkServer(WireMessage, tag="start_fork_server"):
    """Host to the fork server of a pool: import the target, then fork a worker for each socket that follows."""

    section: str
    pool: PoolSpec | EnvPoolSpec


class StartServer(WireMessage, tag="start_server"):
    """Host to a supervisor: start this server and keep it running."""

    domain: str
    server: ServerSpec
    port: int


class Started(WireMessage, tag="started"):
    """Worker to host: the first message, with the process id."""

    pid: Id


class Ready(WireMessage, tag="ready"):
    """Worker to host: the plug-in is built. Supervisor to host: the server answers. Host to rank: all pools work."""

    mode: str = ""
    """See `worker.call_mode`; empty for environments."""
    max_batch: Annotated[int, msgspec.Meta(ge=1)] = BATCH_ITEMS


class Goodbye(WireMessage, tag="goodbye"):
    """Worker of environments to host: assign no more episodes."""


class StartFailed(WireMessage, tag="failed"):
    """Replaces `Ready`: a user's mistake, in one line."""

    detail: str


class Ping(WireMessage, tag="ping"):
    """Client to host, and host to worker of environments: request a `Pong`."""


class PoolPulse(WireMessage):
    """State of a pool by which a client chooses hosts."""

    progress: int
    """Changes with each verdict, reply or started worker."""
    places: int
    """Calls that it can run at once; 0 if it never has a worker."""
    spec: str
    """See `spec_digest`; identifies the pool's settings."""


class Pong(WireMessage, tag="pong"):
    """Host to client, and worker of environments to host: the sender is alive."""

    pools: dict[str, PoolPulse] = field(default_factory=dict)
    """Keys are domains and `env.<tag>`; empty at a host that refuses requests."""


class Error(WireMessage, tag="error"):
    """Host to client: your last frame was malformed or exceeded a limit."""

    detail: str


class GetStatus(WireMessage, tag="get_status"):
    """Any peer to host: request a `HostStatus`."""


class PoolStatus(WireMessage):
    """Status of one pool."""

    target: str
    workers: int
    ready: int
    running: int
    queued: int
    verdicts: int
    deaths: int
    broken: str = ""
    """Reason why no worker can start."""


class HostStatus(WireMessage, tag="host_status"):
    """Status of a host."""

    pid: int
    uptime_seconds: float
    clients: int
    """Clients with requests in flight or unread replies."""
    in_flight: int
    unsent_replies: int
    """Verdicts whose client does not read."""
    refused_keys: int
    """Connections refused for an unlisted key."""
    draining: bool
    pools: dict[str, PoolStatus]
    envs: dict[str, PoolStatus] = field(default_factory=dict)
    """Keys are tags; `running` counts sessions, `queued` waiting resets, `verdicts` replies."""


SCORE_INPUT = Codec(ScoreInput)
ENV_REPLY = Codec(EnvReply)
TO_HOST = Codec(ScoreRequests, CancelScores, Ping, GetStatus, SessionRequests)
TO_CLIENT = Codec(ScoreReplies, SessionReplies, Pong, Error)
TO_STATUS = Codec(HostStatus, Error)
TO_WORKER = Codec(ScoreRequests)
FROM_WORKER = Codec(Started, Ready, StartFailed, ScoreReplies)
TO_ENV_WORKER = Codec(SessionRequests, Ping)
FROM_ENV_WORKER = Codec(Started, Ready, StartFailed, SessionReplies, Pong, Goodbye)
TO_CHILD = Codec(StartHost, StartForkServer, StartServer)
FROM_CHILD = Codec(Ready, StartFailed)
