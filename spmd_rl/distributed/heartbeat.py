"""Heartbeats through the store: each rank's position, and one progress counter.

They are read only after a failure. Ages are on the reader's clock, corrected by differences at the start.
"""

import time
from collections.abc import Sequence

import msgspec
import torch.distributed as dist

from spmd_rl.distributed.journal import Journal
from spmd_rl.distributed.report import Heartbeat, Peer, RankState

BEAT_SECONDS = 0.25
"""Seconds between beats, for up to 256 ranks; more in larger worlds, for the store's sake"""
SILENT_BEATS = 6
"""Missed beats after which a rank counts as stopped, dead or cut off"""


class Heartbeats:
    """One rank's heartbeats. store: a private clone, on which other threads must not wait."""

    def __init__(self, store: dist.Store, me: Peer, peers: list[Peer], journal: Journal) -> None:
        """peers: all ranks, by rank, `me` included, with clocks read together."""
        self._store, self._journal = store, journal
        self.me, self.peers = me, peers
        self.beat_seconds = BEAT_SECONDS * max(1.0, len(peers) / 256)
        self.silent_seconds = SILENT_BEATS * self.beat_seconds
        self._reported = 0

    def beat(self) -> int:
        """Publish this rank's position; return all ranks' progress since the start."""
        journal = self._journal
        self._store.set(f"beat/{self.me.rank}", msgspec.msgpack.encode(self.own_heartbeat().state))
        # A rank that may be slow counts as progress, so that no watchdog sees a stall.
        journal.progress += journal.excused()
        progress = journal.progress
        increment, self._reported = progress - self._reported, progress
        return self._store.add("progress", increment)

    def own_heartbeat(self) -> Heartbeat:
        """Return this rank's current position."""
        journal = self._journal
        state = RankState(time.monotonic(), journal.step, journal.phase_name, journal.inside, journal.last)
        return Heartbeat(self.me, state, 0.0, True)

    def read(self, peers: Sequence[Peer] | None = None) -> list[Heartbeat]:
        """Return these ranks' last heartbeats, by rank; of all by default."""
        peers = self.peers if peers is None else peers
        now = time.monotonic() - self.me.clock
        keys = [f"beat/{peer.rank}" for peer in peers]
        # One `check` for all keys is the common case; single ones only if a rank has never sent a heartbeat.
        all_there = self._store.check(keys)
        there = [all_there or self._store.check([key]) for key in keys]
        found = iter(self._store.multi_get([key for key, is_there in zip(keys, there, strict=True) if is_there]))
        heartbeats = []
        for peer, is_there in zip(peers, there, strict=True):
            state = msgspec.msgpack.decode(next(found), type=RankState) if is_there else None
            age = now - (state.clock - peer.clock) if state else now
            heartbeats.append(Heartbeat(peer, state, age, age < self.silent_seconds))
        return heartbeats

    def live(self, peers: Sequence[Peer]) -> set[int]:
        """Return which of these ranks have a recent heartbeat."""
        return {heartbeat.peer.rank for heartbeat in self.read(peers) if heartbeat.live}

    def local_peers(self) -> list[Peer]:
        """Return the other ranks of this node."""
        mine = (self.me.host, self.me.node)
        return [peer for peer in self.peers if (peer.host, peer.node) == mine and peer.rank != self.me.rank]
