"""The attached nodes of a host, as the host sees them: each takes questions off the pools' queues, and owes verdicts.

A node judges as a host does (its own pools, deadlines, condemnations). What it was given and has not answered goes back
to the queue when the node is silent, hangs up or no longer has it; the first verdict counts. A question with which
`MAX_LOST` nodes were lost is a suspect, and stays here. Leaves out the node's side (`attach.py`).
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from spmd_rl import wire
from spmd_rl.sidecar.pool import Job, Pool
from spmd_rl.types import Verdict

MAX_NODES = 1024
LEASE_SECONDS = 5.0
"""A node that has been silent for so long is lost."""
QUIET_SECONDS = 1.0
"""One that has been silent for so long is written to, which tells whether its connection is still there."""
SETTLE_SECONDS = 2.0
"""A question that was given so long ago is in the node's lists, or was lost on the way."""
MAX_LOST = 2


@dataclass(eq=False, slots=True)
class _Node:
    name: str
    heard: float
    written: float
    windows: dict[str, int] = field(default_factory=dict)
    running: dict[int, tuple[Job, float]] = field(default_factory=dict)
    """By number: the question, and when it was given."""
    load: Counter[str] = field(default_factory=Counter)
    """Of `running`, by domain."""
    verdicts: int = 0


class Nodes:
    """The host calls `heed` with each frame of a node, `tick` in every round, `lose` for a peer that is not there.

    `send(peer, message)` is False if the frame must wait; `resolve(job, verdict)` is called once for each verdict.
    """

    def __init__(
        self,
        host: str,
        pools: Mapping[str, Pool],
        specs: Mapping[str, wire.Pool],
        send: Callable[[bytes, msgspec.Struct], bool],
        resolve: Callable[[Job, msgspec.Raw], None],
    ) -> None:
        self._host, self._pools, self._send, self._resolve = host, pools, send, resolve
        self._specs = {name: spec for name, spec in specs.items() if not spec.url}  # a server of this node serves it
        self._nodes: dict[bytes, _Node] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def heed(self, peer: bytes, message: wire.Join | wire.Serve | wire.Verdicts | wire.Leave, now: float) -> None:
        """Take in what a node has said. WireError if there are too many."""
        if isinstance(message, wire.Join):
            self._join(peer, message, now)
        elif isinstance(message, wire.Leave):
            self.lose(peer, blame=False)
        elif (node := self._nodes.get(peer)) is None:
            self._send(peer, wire.Pong("", {}))  # not the name it knows: it joins anew
        elif isinstance(message, wire.Serve):
            self._serve(peer, node, message, now)
        else:
            for item in message.items:
                self._judged(node, item.id, item.verdict)

    def tick(self, now: float) -> None:
        """Find out who is lost, and give the others what they have room for."""
        for peer, node in list(self._nodes.items()):
            if now - node.heard > LEASE_SECONDS:
                self.lose(peer)
                continue
            if now - max(node.heard, node.written) > QUIET_SECONDS:
                node.written = now
                self._send(peer, wire.Pong(self._host, {}))
            for domain, window in node.windows.items():
                self._give(peer, node, domain, window, now)

    def lose(self, peer: bytes, blame: bool = True) -> None:
        """Forget a node and put its questions back. `blame`: one of them may have to do with it."""
        if (node := self._nodes.pop(peer, None)) is None:
            return
        jobs = [job for job, _ in node.running.values() if not job.dropped]
        end = "is lost" if blame else "has left"
        print(f"sidecar: node {node.name} {end}; {len(jobs)} questions go to others", file=sys.stderr, flush=True)
        for job in reversed(jobs):
            job.lost += blame
            self._pools[job.domain].put_back([job], suspect=job.lost >= MAX_LOST)

    def close(self) -> None:
        """Tell them that the run is over."""
        for peer in list(self._nodes):
            self._send(peer, wire.Leave())

    def report(self, now: float) -> list[wire.NodeReport]:
        """Where each stands."""
        return [
            wire.NodeReport(node.name, node.windows, len(node.running), node.verdicts, now - node.heard)
            for node in self._nodes.values()
        ]

    def _join(self, peer: bytes, message: wire.Join, now: float) -> None:
        self.lose(peer, blame=False)
        if len(self._nodes) >= MAX_NODES:
            raise wire.WireError(f"{MAX_NODES} nodes are attached already")
        self._nodes[peer] = _Node(message.name, heard=now, written=now)
        offered = {domain: self._specs[domain] for domain in message.domains if domain in self._specs}
        self._send(peer, wire.Offer(self._host, offered))

    def _serve(self, peer: bytes, node: _Node, message: wire.Serve, now: float) -> None:
        node.heard = now
        self._send(peer, wire.Pong(self._host, {}))
        if message.host != self._host:
            return
        node.windows = {domain: size for domain, size in message.windows.items() if domain in self._specs}
        has = set(message.under_way)
        for number, (job, since) in list(node.running.items()):
            if number not in has and now - since > SETTLE_SECONDS:
                self._take_back(node, number)
                self._pools[job.domain].put_back([job])

    def _judged(self, node: _Node, number: int, verdict: Verdict) -> None:
        if number in node.running:
            job = self._take_back(node, number)
            node.verdicts += 1
            pool = self._pools[job.domain]
            pool.beats += 1
            self._resolve(job, wire.pack(verdict))

    def _give(self, peer: bytes, node: _Node, domain: str, window: int, now: float) -> None:
        pool = self._pools[domain]
        # a peer that is found gone while we write to it has been forgotten, and what it was given put back
        while peer in self._nodes and (jobs := pool.take(min(window - node.load[domain], wire.BATCH_ITEMS))):
            items = []
            for job in jobs:
                items.append(wire.Score(self._next_number, domain, job.timeout, job.question))
                node.running[self._next_number] = (job, now)
                self._next_number += 1
            node.load[domain] += len(jobs)
            if not self._send(peer, wire.Scores(items)):
                pool.put_back([self._take_back(node, item.id) for item in items])
                return

    def _take_back(self, node: _Node, number: int) -> Job:
        job, _ = node.running.pop(number)
        node.load[job.domain] -= 1
        return job
