"""The worker nodes that have joined a host, as the host sees them: each takes jobs off the pools' queues.

A worker node judges as a host does, with pools of its own. A job that was given to a node returns to the queue when the
node is silent, hangs up or no longer has it; the first verdict counts. A job with which `MAX_LOST` nodes were lost is a
suspect and stays on this host. The node's side is `worker_node.py`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from spmd_rl import wire
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.pool import Job, Pool
from spmd_rl.types import Verdict

MAX_NODES = 1024
LEASE_SECONDS = 5.0
"""A node that has been silent for this long is lost."""
QUIET_SECONDS = 1.0
"""A node that has been silent for this long is written to, which shows whether its connection still exists."""
SETTLE_SECONDS = 2.0
"""A job that was given this long ago is in the node's heartbeat, or it was lost on the way."""
MAX_LOST = 2


@dataclass(eq=False, slots=True)
class _RemoteNode:
    name: str
    last_heard: float
    last_written: float
    windows: dict[str, int] = field(default_factory=dict)
    running: dict[int, tuple[Job, float]] = field(default_factory=dict)
    """By number: the job and when it was given."""
    verdicts: int = 0


class RemoteNodes:
    """The host calls `on_message` with each message of a node, `tick` in every round, `lose` for a peer that is gone.

    `send(peer, message)` returns False if the frame must wait; `resolve(job, verdict)` is called once for each verdict.
    """

    def __init__(
        self,
        host: str,
        pools: Mapping[str, Pool],
        specs: Mapping[str, wire.PoolSpec],
        send: Callable[[bytes, msgspec.Struct], bool],
        resolve: Callable[[Job, Verdict], None],
        loop: EventLoop,
    ) -> None:
        self._host, self._pools, self._send, self._resolve, self._loop = host, pools, send, resolve, loop
        self._specs = {name: spec for name, spec in specs.items() if not spec.url}  # a server is reached from here only
        self._nodes: dict[bytes, _RemoteNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def on_message(self, peer: bytes, message: wire.Join | wire.Heartbeat | wire.ScoreReplies | wire.Goodbye) -> None:
        """Handle a message of a node. WireError if there are too many nodes."""
        if isinstance(message, wire.Join):
            self._on_join(peer, message)
        elif isinstance(message, wire.Goodbye):
            self.lose(peer, blame=False)
        elif (node := self._nodes.get(peer)) is None:
            self._send(peer, wire.Pong("", {}))  # not the name that it knows: it joins again
        elif isinstance(message, wire.Heartbeat):
            self._on_heartbeat(peer, node, message)
        else:
            for item in message.items:
                self._on_verdict(node, item)

    def tick(self) -> None:
        """Find the nodes that are lost, and give the others what they have room for."""
        for peer, node in list(self._nodes.items()):
            if self._loop.now - node.last_heard > LEASE_SECONDS:
                self.lose(peer)
                continue
            if self._loop.now - max(node.last_heard, node.last_written) > QUIET_SECONDS:
                node.last_written = self._loop.now
                self._send(peer, wire.Pong(self._host, {}))
            for domain, window in node.windows.items():
                self._give(peer, node, domain, window)

    def lose(self, peer: bytes, blame: bool = True) -> None:
        """Forget a node and put its jobs back. With `blame`, one of them may be the reason for its loss."""
        if (node := self._nodes.pop(peer, None)) is None:
            return
        jobs = [job for job, _ in node.running.values() if not job.cancelled]
        text = f"worker node {node.name} {'is lost' if blame else 'has left'}; {len(jobs)} requests go to others"
        print(f"sidecar: {text}", file=sys.stderr, flush=True)
        for job in reversed(jobs):
            job.lost_nodes += blame
            self._pools[job.domain].put_back([job], suspect=job.lost_nodes >= MAX_LOST)

    def close(self) -> None:
        """Tell all nodes that the run is over."""
        for peer in list(self._nodes):
            self._send(peer, wire.Goodbye())

    def status(self) -> list[wire.NodeStatus]:
        """Return the state of each node."""
        return [
            wire.NodeStatus(node.name, node.windows, len(node.running), node.verdicts, self._loop.now - node.last_heard)
            for node in self._nodes.values()
        ]

    def _on_join(self, peer: bytes, message: wire.Join) -> None:
        self.lose(peer, blame=False)
        if len(self._nodes) >= MAX_NODES:
            raise wire.WireError(f"{MAX_NODES} worker nodes have joined already")
        self._nodes[peer] = _RemoteNode(message.name, self._loop.now, self._loop.now)
        pools = {domain: self._specs[domain] for domain in message.domains if domain in self._specs}
        self._send(peer, wire.Welcome(self._host, pools))

    def _on_heartbeat(self, peer: bytes, node: _RemoteNode, message: wire.Heartbeat) -> None:
        node.last_heard = self._loop.now
        self._send(peer, wire.Pong(self._host, {}))
        if message.host != self._host:
            return
        node.windows = {domain: size for domain, size in message.windows.items() if domain in self._specs}
        running = set(message.running)
        for number, (job, given_at) in list(node.running.items()):
            if number not in running and self._loop.now - given_at > SETTLE_SECONDS:
                del node.running[number]
                self._pools[job.domain].put_back([job])

    def _on_verdict(self, node: _RemoteNode, item: wire.ScoreReply) -> None:
        if item.id in node.running:
            job, _ = node.running.pop(item.id)
            node.verdicts += 1
            self._pools[job.domain].progress += 1
            self._resolve(job, item.verdict)

    def _give(self, peer: bytes, node: _RemoteNode, domain: str, window: int) -> None:
        pool = self._pools[domain]
        room = window - sum(job.domain == domain for job, _ in node.running.values())
        # a peer that is found gone while we write to it has been forgotten, and its jobs have been put back
        while peer in self._nodes and (jobs := pool.take(min(room, wire.BATCH_ITEMS))):
            room -= len(jobs)
            node.running |= {job.number: (job, self._loop.now) for job in jobs}
            if not self._send(peer, wire.ScoreRequests([job.request for job in jobs])):
                for job in jobs:
                    del node.running[job.number]
                pool.put_back(jobs)
                return
