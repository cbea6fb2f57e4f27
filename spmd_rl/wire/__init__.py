"""The messages of the sidecar: their schemas, their encoding and their limits.

Ranks, hosts and workers speak the *score protocol*: a `ScoreRequest` asks for one verdict, a `ScoreReply` carries it.
Requests are stateless, so that any worker may judge one again. Environments are played over the *session protocol*
(`sessions`). The other messages start processes and report the host's status.

A frame is one version byte followed by a msgpack array `[tag, field, ...]`, which is checked against the structs below.
Frames are bounded in size and never pickled. Bytes that cannot be read raise `WireError`, whatever they are. Sockets
live in `sidecar/`.

    frame = wire.encode(wire.Ping())
    message = wire.TO_HOST.decode(frame)
"""

# ruff: noqa: F401  imported here to be had as `wire.NAME`
from spmd_rl.types import EnvReply
from spmd_rl.wire.base import (
    BATCH_BYTES,
    BATCH_ITEMS,
    MAX_ACTION_BYTES,
    MAX_ENV_REPLY_BYTES,
    MAX_FRAME_BYTES,
    MAX_INPUT_BYTES,
    MAX_ITEMS,
    MAX_TIMEOUT,
    VERSION,
    WINDOW,
    WINDOW_BYTES,
    Codec,
    Few,
    Id,
    Many,
    Name,
    Seconds,
    WireError,
    WireMessage,
    encode,
    pack,
)
from spmd_rl.wire.processes import (
    EnvPoolSpec,
    Error,
    GetStatus,
    Goodbye,
    HostStatus,
    Ping,
    Pong,
    PoolPulse,
    PoolSpec,
    PoolStatus,
    Ready,
    ServerSpec,
    Started,
    StartFailed,
    StartForkServer,
    StartHost,
    StartServer,
    spec_digest,
)
from spmd_rl.wire.scores import (
    CancelScores,
    ScoreInput,
    ScoreInputShape,
    ScoreReplies,
    ScoreReply,
    ScoreRequest,
    ScoreRequests,
)
from spmd_rl.wire.sessions import (
    CloseRequest,
    ResetRequest,
    SessionFailure,
    SessionReplies,
    SessionReply,
    SessionRequests,
    StepRequest,
)

SCORE_INPUT = Codec(ScoreInput)
SCORE_INPUT_SHAPE = Codec(ScoreInputShape)
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
