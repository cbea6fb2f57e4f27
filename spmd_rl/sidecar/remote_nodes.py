"""The worker nodes that have joined a host, as the host sees them: each takes jobs off the pools' queues.

A worker node judges as a host does, with pools of its own. A job that was given to a node returns to the queue when the
node is silent, hangs up, no longer has it, or is late with it; the first verdict counts. A job with which `MAX_LOST`
nodes were lost or late is a suspect and stays on this host. A node whose verdict is none is dismissed for the rest of
the run. The node's side is `worker_node.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from spmd_rl import wire
from spmd_rl.errors import one_line, tell
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.pool import Pool, ScoreJob
from spmd_rl.sidecar.verdicts import checked_reply
from spmd_rl.types import Verdict

MAX_NODES = 1024
LEASE_SECONDS = 5.0
"""A node that has been silent for this long is lost."""
QUIET_SECONDS = 1.0
"""A node that has been silent for this long is written to, which shows whether its connection still exists."""
SETTLE_SECONDS = 2.0
"""A job that was given this long ago is in the node's heartbeat, or it was lost on the way."""
MAX_LOST = 2
LATE_SHARE = 0.5
"""A node that has had a job for this share of its timeout is late with it."""
CHECK_SECONDS = 0.1
"""The pause between two looks at what is late."""
MAX_DISMISSED = 1024


@dataclass(eq=False, slots=True)
class _RemoteNode:
    name: str
    last_seen: float
    last_written: float
    windows: dict[str, int] = field(default_factory=dict)
    running: dict[int, tuple[ScoreJob, float]] = field(default_factory=dict)
    """By number: the job and when it was given."""
    late: dict[int, ScoreJob] = field(default_factory=dict)
    """By number: jobs that others have got too, but whose verdict may still come from here."""
    is_slow: bool = False
    """Whether it was late and has answered nothing in time since: it gets one job at a time."""
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
        resolve: Callable[[ScoreJob, Verdict], None],
        loop: EventLoop,
    ) -> None:
        self._host, self._pools, self._send, self._resolve, self._loop = host, pools, send, resolve, loop
        self._specs = {name: spec for name, spec in specs.items() if not spec.url}  # a server is reached from here only
        self._nodes: dict[bytes, _RemoteNode] = {}
        self._dismissed: set[str] = set()
        self._next_check = 0.0

    def __len__(self) -> int:
        return len(self._nodes)

    def on_message(
        self, peer: bytes, message: wire.NodeJoin | wire.NodeHeartbeat | wire.NodeReplies | wire.Goodbye
    ) -> None:
        """Handle a message of a node. WireError if there are too many nodes, or it was dismissed."""
        if isinstance(message, wire.NodeJoin):
            self._on_join(peer, message)
        elif isinstance(message, wire.Goodbye):
            self.lose(peer, blame=False)
        elif (node := self._nodes.get(peer)) is None:
            self._send(peer, wire.Pong("", {}))  # not the name that it knows: it joins again
        elif isinstance(message, wire.NodeHeartbeat):
            self._on_heartbeat(peer, node, message)
        else:
            for item in message.items:
                if peer in self._nodes:
                    self._on_verdict(peer, node, item)

    def tick(self) -> None:
        """Find the nodes that are lost, and give the others what they have room for."""
        look = self._loop.now >= self._next_check
        if look:
            self._next_check = self._loop.now + CHECK_SECONDS
        for peer, node in list(self._nodes.items()):
            if look:
                self._take_back_late(node)
            if self._loop.now - node.last_seen > LEASE_SECONDS:
                self.lose(peer)
                continue
            if self._loop.now - max(node.last_seen, node.last_written) > QUIET_SECONDS:
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
        tell(f"sidecar: {text}")
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
            wire.NodeStatus(node.name, node.windows, len(node.running), node.verdicts, self._loop.now - node.last_seen)
            for node in self._nodes.values()
        ]

    def _on_join(self, peer: bytes, message: wire.NodeJoin) -> None:
        self.lose(peer, blame=False)
        name = one_line(message.name)
        if name in self._dismissed:
            raise wire.WireError(f"worker node {name} was dismissed for a verdict that is none")
        if len(self._nodes) >= MAX_NODES:
            raise wire.WireError(f"{MAX_NODES} worker nodes have joined already")
        self._nodes[peer] = _RemoteNode(name, self._loop.now, self._loop.now)
        pools = {domain: self._specs[domain] for domain in message.domains if domain in self._specs}
        self._send(peer, wire.NodeWelcome(self._host, pools))

    def _on_heartbeat(self, peer: bytes, node: _RemoteNode, message: wire.NodeHeartbeat) -> None:
        node.last_seen = self._loop.now
        self._send(peer, wire.Pong(self._host, {}))
        if message.host != self._host:
            return
        node.windows = {domain: size for domain, size in message.windows.items() if domain in self._specs}
        running = set(message.running)
        for number, (job, given_at) in list(node.running.items()):
            if number not in running and self._loop.now - given_at > SETTLE_SECONDS:
                del node.running[number]
                self._pools[job.domain].put_back([job])
        node.late = {number: job for number, job in node.late.items() if number in running}

    def _on_verdict(self, peer: bytes, node: _RemoteNode, item: wire.NodeReply) -> None:
        is_in_time = item.id in node.running
        job = node.running[item.id][0] if is_in_time else node.late.get(item.id)
        if job is None:
            return
        try:
            verdict = checked_reply(item.verdict)
        except ValueError as error:
            self._dismiss(peer, node, one_line(str(error)))
            return
        node.running.pop(item.id, None)
        node.late.pop(item.id, None)
        node.is_slow = node.is_slow and not is_in_time
        node.verdicts += 1
        self._pools[job.domain].progress += 1
        if not job.cancelled:  # else another was faster
            self._resolve(job, verdict)
            job.cancelled = True

    def _dismiss(self, peer: bytes, node: _RemoteNode, why: str) -> None:
        if len(self._dismissed) < MAX_DISMISSED:
            self._dismissed.add(node.name)
        tell(f"sidecar: worker node {node.name} is dismissed: its verdict is none: {why}")
        self._send(peer, wire.Error(f"a verdict is none: {why}"))
        self.lose(peer)

    def _take_back_late(self, node: _RemoteNode) -> None:
        """Give others what the node should have answered by now; it may still be the first to answer."""
        now = self._loop.now
        late = [job for job, given_at in node.running.values() if now - given_at > LATE_SHARE * job.timeout]
        if late and not node.is_slow:
            node.is_slow = True
            text = f"worker node {node.name} is late with {len(late)} requests; they go to others too"
            tell(f"sidecar: {text}")
        for job in reversed(late):
            del node.running[job.number]
            if not job.cancelled:
                node.late[job.number] = job
                job.lost_nodes += 1
                self._pools[job.domain].progress += 1
                self._pools[job.domain].put_back([job], suspect=job.lost_nodes >= MAX_LOST)

    def _give(self, peer: bytes, node: _RemoteNode, domain: str, window: int) -> None:
        pool = self._pools[domain]
        room = min(window, 1 if node.is_slow else window)
        room -= sum(job.domain == domain for job in (*node.late.values(), *(job for job, _ in node.running.values())))
        # a peer that is found gone while we write to it has been forgotten, and its jobs have been put back
        while peer in self._nodes and (jobs := pool.take(max(0, min(room, wire.BATCH_ITEMS)))):
            room -= len(jobs)
            node.running |= {job.number: (job, self._loop.now) for job in jobs}
            if not self._send(peer, wire.ScoreRequests([job.request for job in jobs])):
                for job in jobs:
                    del node.running[job.number]
                pool.put_back(jobs)
                return
