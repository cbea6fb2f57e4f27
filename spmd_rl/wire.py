"""The frames between a rank and its sidecar, and between a sidecar host, its workers and attached nodes.

A frame is one version byte, then a msgpack array `[tag, field, ...]` checked against the structs below. Bounded in
size, never pickle. What cannot be read is a `WireError`, whatever the bytes were. Sockets live in `sidecar/`.

    frame = wire.encode(wire.Ping())
    message = wire.TO_HOST.decode(frame)
"""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Annotated, Any

import msgspec

from spmd_rl.types import AnswerInfo, Prompt, Verdict

VERSION = 1
MAX_FRAME_BYTES = 16 << 20
"""The largest frame that is sent or accepted."""
MAX_QUESTION_BYTES = 8 << 20
"""The largest single question; a longer answer is `rejected` where it was asked."""
BATCH_BYTES = 1 << 20
"""Senders close a frame of several items when it has grown so large."""
BATCH_ITEMS = 256
"""And when it holds so many."""
WINDOW = 2048
"""Questions that a client may have under way at its host; the others wait at the client."""
WINDOW_BYTES = 64 << 20
"""The same, in bytes."""
HELD_BYTES = 32 * WINDOW_BYTES
"""What a host holds for all clients together; questions beyond are refused, and asked again."""

MAX_TIMEOUT = 86_400.0
"""Seconds; the longest that a rewarder may take over one answer."""


class WireError(ValueError):
    """Bytes that are no frame of this version and schema, or a message that has no frame."""


class _Struct(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    pass


Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Domain = Annotated[str, msgspec.Meta(max_length=200)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]


class Question(_Struct):
    """One answer to judge. Travels as the `question` of a `Score` and a `Job`; only the worker looks inside."""

    prompt: Prompt
    answer: str
    info: AnswerInfo


class RawQuestion(_Struct):
    """`Question` as the client sends it: its prompt is packed once for all its answers."""

    prompt: msgspec.Raw
    answer: str
    info: AnswerInfo


class Score(_Struct):
    """Client's wish for one verdict. Sent again under the same id, it is still one wish."""

    id: Id
    domain: Domain
    timeout: Seconds
    """Running time allowed; waiting for a worker does not count."""
    question: msgspec.Raw


class Scores(_Struct, tag="scores"):
    """Client to host."""

    items: list[Score]


class Drop(_Struct, tag="drop"):
    """Client to host: nobody waits for these any more."""

    ids: list[Id]


class Ping(_Struct, tag="ping"):
    """Client to host: are you there?"""


class Pong(_Struct, tag="pong"):
    """Host to client."""

    host: str
    """Unlike after the host was started anew: then whatever is under way must be sent again."""
    beats: dict[str, int]
    """Per domain, a number that changes whenever that pool moves: a verdict, a worker that starts."""


class Judged(_Struct):
    """Host's answer to one `Score`."""

    id: Id
    verdict: Verdict


class RawJudged(_Struct):
    """`Judged` as the host passes it on, its verdict unopened."""

    id: Id
    verdict: msgspec.Raw


class Verdicts(_Struct, tag="verdicts"):
    """Host to client."""

    items: list[Judged]


class RawVerdicts(_Struct, tag="verdicts"):
    """`Verdicts` as the host sends it."""

    items: list[RawJudged]


class Error(_Struct, tag="error"):
    """Host to client: your last frame was not understood, or was too much."""

    detail: str


class Job(_Struct):
    """One question on its way to a worker."""

    number: Id
    timeout: Seconds
    question: msgspec.Raw


class Work(_Struct, tag="work"):
    """Host to worker: judge these, in order."""

    jobs: list[Job]


class Started(_Struct, tag="started"):
    """Worker to host, first thing."""

    pid: Id


class Ready(_Struct, tag="ready"):
    """Worker to host: the rewarder is built. Host to the rank that started it: all pools have a worker."""

    style: str = ""
    """Worker only: `each`, `async` or `batch`."""
    max_batch: Annotated[int, msgspec.Meta(ge=1)] = BATCH_ITEMS
    """Worker only: the most questions that it wants at once."""


class Failed(_Struct, tag="failed"):
    """In place of `Ready`: a user's mistake, in one line."""

    detail: str


class Done(_Struct, tag="done"):
    """Worker to host: one verdict, sent before the next job is begun."""

    number: Id
    verdict: msgspec.Raw


class Pool(_Struct):
    """The workers of one domain."""

    target: str
    args: dict[str, Any]
    workers: int
    sandbox: str = "auto"
    """Which sandbox the rewarder gets if it asks for one."""
    cpus: list[int] = []
    """Processors that the workers keep to; none: whatever the host may use."""
    start_seconds: float = 300.0
    """Until a worker must have built its rewarder."""
    url: str = ""
    """Of the domain's own server, if the host starts one."""


class Join(_Struct, tag="join"):
    """Attached node to host: what is there to do in these domains?"""

    name: Domain
    domains: list[Domain]


class Offer(_Struct, tag="offer"):
    """Host to an attached node, in answer: this, of what it named. Its workers, processors, sandbox are its own."""

    host: str
    pools: dict[str, Pool]


class Serve(_Struct, tag="serve"):
    """Attached node to host, several times a second. Silence means that it is lost."""

    host: str
    """Of the offer. A host that is called otherwise says so in a `Pong`, and is joined anew."""
    windows: dict[str, Annotated[int, msgspec.Meta(ge=0, le=WINDOW)]]
    """By domain: so many questions may be under way here."""
    under_way: list[Id]
    """All questions whose verdicts have not been sent. What the host has given and is not here was lost."""


class Leave(_Struct, tag="leave"):
    """Attached node to host: do not wait for me. Host to attached node: the run is over."""


class Ask(_Struct, tag="ask"):
    """Anybody to host: how are you?"""


class PoolReport(_Struct):
    """A domain, in `Report`."""

    target: str
    workers: int
    """Wanted."""
    ready: int
    """Have built their rewarder."""
    running: int
    """Questions with workers of this host."""
    queued: int
    verdicts: int
    """Since the host started, those of attached nodes too."""
    deaths: int
    """Workers that died or were killed."""
    broken: str = ""
    """Why there is no worker, if so."""


class NodeReport(_Struct):
    """An attached node, in `Report`."""

    name: str
    windows: dict[str, int]
    running: int
    verdicts: int
    silent_seconds: float


class Report(_Struct, tag="report"):
    """Host, asked for it."""

    host: str
    pid: int
    uptime_seconds: float
    clients: int
    """With questions under way."""
    under_way: int
    held_bytes: int
    refused_keys: int
    draining: bool
    pools: dict[str, PoolReport]
    nodes: list[NodeReport]


class Server(_Struct):
    """A server of a domain's own."""

    command: list[str]
    """`{port}` in it stands for the port."""
    devices: str
    """As in CUDA_VISIBLE_DEVICES; empty: none."""
    start_seconds: float
    """Until it must answer."""


class Keep(_Struct, tag="keep"):
    """Host to a keeper: start this, and see that it runs."""

    domain: str
    server: Server
    port: int


class Start(_Struct, tag="start"):
    """Rank to the host that it starts."""

    parent: int
    """Pid that the host must not outlive."""
    address: str
    pools: dict[str, Pool]
    servers: dict[str, Server] = {}
    keys: str = ""
    """Directory of CURVE keys; none: the address is of this machine."""


class Warm(_Struct, tag="warm"):
    """Host to a zygote: import this, then fork on demand."""

    parent: int
    domain: str
    pool: Pool


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct, frame: bytearray | None = None) -> bytearray:
    """The frame of a message. WireError if a value has no msgpack form or the frame would be too large.

    frame: overwritten and given back; a sender that keeps one keeps the memory that its largest frames took.
    """
    frame = bytearray(1) if frame is None else frame
    frame[:1] = (VERSION,)
    _sayable(_encoder.encode_into, message, frame, 1)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} travel")
    return frame


def pack(value: Any) -> msgspec.Raw:
    """A part of a later frame, encoded once. WireError if it has no msgpack form (an object, a lone surrogate...)."""
    return msgspec.Raw(_sayable(_encoder.encode, value))


def _sayable(encode: Callable[..., Any], *args: Any) -> Any:
    """What `encode` gives; WireError where a value has no form."""
    try:
        return encode(*args)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot be sent: {error}") from None


class Codec:
    """Decodes the frames that one kind of receiver understands."""

    def __init__(self, *messages: type) -> None:
        self._decoder = msgspec.msgpack.Decoder(reduce(or_, messages))

    def decode(self, frame: bytes) -> Any:
        """The message in a frame. WireError for anything else; never another exception."""
        if not frame or frame[0] != VERSION:
            raise WireError(f"frame version {frame[0] if frame else 'missing'}, ours is {VERSION}")
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} travel")
        return self.unpack(memoryview(frame)[1:])

    def unpack(self, body: Any) -> Any:
        """The same for a part packed by `pack`."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise WireError(f"not understood: {error}") from None


QUESTION = Codec(Question)
TO_HOST = Codec(Scores, Drop, Ping, Join, Serve, Verdicts, Leave, Ask)
TO_CLIENT = Codec(Verdicts, Pong, Error)
TO_NODE = Codec(Offer, Scores, Pong, Leave, Error)
TO_ASKER = Codec(Report, Error)
TO_WORKER = Codec(Work)
FROM_WORKER = Codec(Started, Ready, Failed, Done)
TO_ZYGOTE = Codec(Warm)
TO_KEEPER = Codec(Keep)
FROM_KEEPER = Codec(Ready, Failed)
STARTING_HOST = Codec(Start)
FROM_HOST = Codec(Ready, Failed)
