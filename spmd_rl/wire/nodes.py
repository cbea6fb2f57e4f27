"""Messages of worker nodes: machines without ranks that join a host."""

from typing import Annotated

import msgspec

from spmd_rl.wire.base import WINDOW, Few, Id, Many, Name, WireMessage
from spmd_rl.wire.processes import PoolSpec


class NodeJoin(WireMessage, tag="join"):
    """Worker node to host: the node asks for work in these domains."""

    name: Name
    domains: Annotated[list[Name], Few]


class NodeWelcome(WireMessage, tag="welcome"):
    """Host to worker node: the pools to open. Their workers, cpus and sandbox are for the node to decide."""

    host: str
    pools: dict[str, PoolSpec]


class NodeHeartbeat(WireMessage, tag="heartbeat"):
    """Worker node to host, twice a second. A node that is silent is lost."""

    host: str
    """The name in the `NodeWelcome`. A host of another name answers with a `Pong`, upon which the node joins again."""
    windows: Annotated[dict[Name, Annotated[int, msgspec.Meta(ge=0, le=WINDOW)]], Few]
    """Per domain, the number of requests that the node takes at a time."""
    running: Annotated[list[Id], Many]
    """All requests whose verdicts have not been sent. A request that the host gave and that is not here was lost."""


class NodeReply(WireMessage):
    """A `ScoreReply` as the host reads it from a worker node, whose word it does not take."""

    id: Id
    verdict: msgspec.Raw
    """What should be an encoded `Verdict`."""


class NodeReplies(WireMessage, tag="score_replies"):
    """`ScoreReplies` as the host reads them from a worker node."""

    items: Annotated[list[NodeReply], Many]


class Goodbye(WireMessage, tag="goodbye"):
    """Worker node to host: the node leaves. Host to worker node: the run is over. Worker of environments to host: it
    should get no more episodes."""
