"""The messages of the sidecar: their schemas, their encoding and their limits.

Ranks, hosts and workers speak the *score protocol*: a `ScoreRequest` asks for one verdict, a `ScoreReply` carries it.
Requests are stateless, so that any worker may judge one again. Environments are played over the *session protocol*: a
session lives with one worker from its reset to its close. A client numbers its sessions, and the calls of each: the
reset is call 0, then come the steps. A call is sent once, and the next one after its answer. The other messages start
processes and report the host's status.

A frame is one version byte followed by a msgpack array `[tag, field, ...]`, which is checked against the structs below.
Frames are bounded in size and never pickled. Bytes that cannot be read raise `WireError`, whatever they are.

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
"""The largest frame that is sent or accepted."""
MAX_INPUT_BYTES = 8 << 20
"""The largest `ScoreInput`; the client gives a larger one the verdict `rejected`."""
BATCH_ITEMS, BATCH_BYTES = 256, 1 << 20
"""A sender closes a frame of several items once it holds so many, or so many bytes."""
WINDOW, WINDOW_BYTES = 2048, 64 << 20
"""The requests, and their bytes, that a client may have in flight at a host; the others wait in the client."""
MAX_ACTION_BYTES = 1 << 20
"""The largest action that is sent to an environment."""
MAX_ENV_REPLY_BYTES = 2 << 20
"""The largest observation and `info` together that an environment may return."""
MAX_TIMEOUT = 86_400.0
"""The longest timeout in seconds."""


class WireError(ValueError):
    """Raised for bytes that are no frame of this version and schema, and for a message that cannot be encoded."""


class WireMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """A message, or a part of one: an array on the wire, and fields that the schema does not have are refused."""


Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
Many = msgspec.Meta(max_length=8 * WINDOW)

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as a frame. WireError if a value has no msgpack form or the frame would be too large."""
    frame = bytes((VERSION,)) + pack(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return frame


def pack(value: Any) -> msgspec.Raw:
    """Encode a part of a later frame. WireError if it has no msgpack form (an object, a lone surrogate...)."""
    try:
        return msgspec.Raw(_encoder.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot be sent: {error}") from None


class Codec:
    """Decodes the frames that one kind of receiver accepts."""

    def __init__(self, *messages: type) -> None:
        self._decoder = msgspec.msgpack.Decoder(reduce(or_, messages))

    def decode(self, frame: bytes) -> Any:
        """Decode the message in a frame. Anything else raises WireError and never another exception."""
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
    """The arguments of a rewarder's `score`: one answer to judge. Only the worker uses them."""

    prompt: Prompt
    answer: str
    info: AnswerInfo


class ScoreRequest(WireMessage):
    """A request for one verdict."""

    id: Id
    domain: Name
    timeout: Seconds
    """The running time that the rewarder may take; waiting for a worker does not count."""
    input: msgspec.Raw
    """An encoded `ScoreInput`."""


class ScoreRequests(WireMessage, tag="score_requests"):
    """Client to host, host to worker."""

    items: Annotated[list[ScoreRequest], Many]


class ScoreReply(WireMessage):
    """The verdict for one `ScoreRequest`."""

    id: Id
    verdict: Verdict


class ScoreReplies(WireMessage, tag="score_replies"):
    """The answer to `ScoreRequests`, in any order. A worker sends one verdict before it begins the next request."""

    items: list[ScoreReply]


class CancelScores(WireMessage, tag="cancel_scores"):
    """Client to host: nobody waits for these verdicts any more."""

    ids: Annotated[list[Id], Many]


class ResetRequest(WireMessage, tag="reset"):
    """Client to host: begin a session. Host to worker: begin an episode in this slot."""

    session: Id
    env: Name
    """The tag of the environment."""
    seed: Annotated[int, msgspec.Meta(ge=0)]
    """At most 64 bits."""
    held_out: bool = False
    """True if the environment is built with its `eval_args`."""
    solve: bool = False
    """True if each reply of the episode has the environment's `solution()` as `info["solution"]`."""


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
    """The return value of an environment for one call."""

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


class PoolSpec(WireMessage, tag="rewarder"):
    """The settings of a domain's workers."""

    target: str
    args: dict[str, Any]
    workers: int
    sandbox: str = "auto"
    """The name of the sandbox for a rewarder that asks for one."""
    cpus: list[int] = field(default_factory=list)
    """The processors that the workers are bound to; if empty, they are not bound."""
    start_seconds: float = 300.0
    """The time that a worker may take to build its rewarder."""
    url: str = ""
    """The address of the domain's own server, if the host starts one."""
    packages: list[str] = field(default_factory=list)
    """Packages that the code of answers may import in the sandbox."""


class EnvPoolSpec(WireMessage, tag="environment"):
    """The settings of an environment's workers."""

    target: str
    args: dict[str, Any]
    workers: int
    """The number of processes."""
    slots: int = 1
    """The number of episodes that each runs at once, each in a thread; a single one has the process for itself."""
    eval_args: dict[str, Any] = field(default_factory=dict)
    """Arguments that replace `args` in held-out episodes."""
    reset_timeout: Seconds = 60.0
    step_timeout: Seconds = 30.0
    memory_mb: int = 0
    """The memory that a worker may use beyond what it has imported; 0 for no limit."""
    recycle_after: int = 0
    """A worker is replaced after this many episodes; 0 for never."""
    sandbox: str = "auto"
    packages: list[str] = field(default_factory=list)
    cpus: list[int] = field(default_factory=list)
    start_seconds: float = 300.0


class ServerSpec(WireMessage):
    """A server that the host starts for one domain, such as a judge."""

    command: list[str]
    """`{port}` in it is replaced by the port."""
    devices: str
    """The value of CUDA_VISIBLE_DEVICES; empty for none."""
    start_seconds: float
    """The time that the server may take until it answers."""


class StartHost(WireMessage, tag="start_host"):
    """Rank to the host that it starts."""

    parent: int
    """The process id that the host must not outlive; 0 if the closing socket alone shows its end."""
    address: str
    pools: dict[str, PoolSpec]
    servers: dict[str, ServerSpec] = field(default_factory=dict)
    keys: str = ""
    """The directory of CURVE keys; empty if only this machine is served."""
    envs: dict[str, EnvPoolSpec] = field(default_factory=dict)


class StartForkServer(WireMessage, tag="start_fork_server"):
    """Host to the fork server of a pool: import the target, then fork a worker for each socket that follows."""

    section: str
    """The settings of the pool: `reward.<domain>` or `env.<tag>`."""
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
    """Worker to host: the rewarder or environment is built. A server's supervisor to host: the server answers. Host to
    rank: all pools work."""

    mode: str = ""
    """Workers of rewarders only: `sync`, `async` or `batch`, as `worker.call_mode` says."""
    max_batch: Annotated[int, msgspec.Meta(ge=1)] = BATCH_ITEMS
    """Workers of rewarders only: the most requests that the rewarder wants at once."""


class Goodbye(WireMessage, tag="goodbye"):
    """Worker of environments to host: it should get no more episodes."""


class StartFailed(WireMessage, tag="failed"):
    """Sent in place of `Ready`: a user's mistake, in one line."""

    detail: str


class Ping(WireMessage, tag="ping"):
    """Client to host, and host to worker of environments: the sender asks for a `Pong`."""


class PoolPulse(WireMessage):
    """The state of a pool that decides which calls a client gives it."""

    progress: int
    """Changes whenever the pool makes progress: a verdict, a reply, a worker that starts."""
    places: int
    """The number of calls that it can run at once; 0 if it has no worker and never will."""
    spec: str
    """The digest of what the pool runs (`spec_digest`)."""


class Pong(WireMessage, tag="pong"):
    """Host to client, and worker of environments to host: the sender is alive."""

    pools: dict[str, PoolPulse] = field(default_factory=dict)
    """Pools by domain, and by `env.<tag>`; empty at a host that takes no more requests."""


class Error(WireMessage, tag="error"):
    """Host to client: your last frame was malformed or exceeded a limit."""

    detail: str


class GetStatus(WireMessage, tag="get_status"):
    """Anybody to host: a request for a `HostStatus`."""


class PoolStatus(WireMessage):
    """The state of one pool."""

    target: str
    workers: int
    """The number of workers in the settings."""
    ready: int
    """The number of workers that have built their rewarder."""
    running: int
    """The number of requests that workers have."""
    queued: int
    verdicts: int
    """Since the host started."""
    deaths: int
    """The number of workers that died or were killed."""
    broken: str = ""
    """The reason why there is no worker, if there is none."""


class HostStatus(WireMessage, tag="host_status"):
    """The state of a host."""

    pid: int
    uptime_seconds: float
    clients: int
    """The number of clients with requests in flight or replies that they have not read."""
    in_flight: int
    """The number of requests without a verdict."""
    unsent_replies: int
    """The number of verdicts that wait because their client does not read."""
    refused_keys: int
    """The number of connections that were refused because their key is not listed."""
    draining: bool
    pools: dict[str, PoolStatus]
    envs: dict[str, PoolStatus] = field(default_factory=dict)
    """Environments by tag; `running` counts sessions, `queued` resets that wait, `verdicts` replies."""


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
