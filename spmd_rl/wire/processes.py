"""Messages between the processes of one machine, and of all connections to a host."""

import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import field

from spmd_rl.wire.base import BATCH_ITEMS, Id, Seconds, WireMessage


class PoolSpec(WireMessage, tag="rewarder"):
    """What the workers of one domain run."""

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
    """What the code of answers may import in the sandbox."""


class EnvPoolSpec(WireMessage, tag="environment"):
    """What the workers of one environment run."""

    target: str
    args: dict[str, Any]
    workers: int
    """The number of processes."""
    slots: int = 1
    """The number of episodes that each runs at once, each in a thread; a single one has the process for itself."""
    eval_args: dict[str, Any] = field(default_factory=dict)
    """What replaces `args` in held-out episodes."""
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


def spec_digest(spec: PoolSpec | EnvPoolSpec) -> str:
    """Return a digest of what decides the results of a pool, wherever and by how many workers they are computed."""
    parts = [spec.target, spec.args, spec.packages]
    if isinstance(spec, EnvPoolSpec):
        parts += [spec.eval_args, spec.reset_timeout, spec.step_timeout]
    return hashlib.sha256(msgspec.msgpack.encode(parts, order="deterministic")).hexdigest()[:16]


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
    """What a client has to know of a pool to give it calls."""

    progress: int
    """Changes whenever the pool makes progress: a verdict, a reply, a worker that starts."""
    places: int
    """The number of calls that it can run at once; 0 if it has no worker and never will."""
    spec: str
    """The digest of what the pool runs (`spec_digest`)."""


class Pong(WireMessage, tag="pong"):
    """Host to client, and worker of environments to host: the sender is alive."""

    pools: dict[str, PoolPulse] = field(default_factory=dict)
    """By domain, and by `env.<tag>`; empty at a host that takes no more requests."""


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
    held_bytes: int
    """The bytes of those requests."""
    unsent_replies: int
    """The number of verdicts that wait because their client does not read."""
    refused_keys: int
    """The number of connections that were refused because their key is not listed."""
    draining: bool
    pools: dict[str, PoolStatus]
    envs: dict[str, PoolStatus] = field(default_factory=dict)
    """By tag; `running` counts sessions, `queued` resets that wait, `verdicts` replies."""
