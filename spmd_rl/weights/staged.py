"""`StagedWeights`: versions of the weights that a training rank keeps in host memory until others have fetched them.

It keeps this rank's share of the newest version and of the one before, until nobody is in the middle of fetching it.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from typing import NamedTuple

from spmd_rl.sidecar import wire
from spmd_rl.weights import delta, messages

KEPT_VERSIONS = 2


class Delta(NamedTuple):
    """What leads from one version of a tensor to the next."""

    payload: bytes | memoryview
    digest: bytes
    base: bytes | None
    """Digest of the tensor of which it is a delta; None: it is the whole."""


class Staged(NamedTuple):
    """One tensor of the weights, as it is served."""

    name: str
    dtype: str
    shape: list[int]
    payload: memoryview
    digest: bytes
    delta: Delta | None = None
    """None where the whole is no larger, or where there was no version before."""


def with_delta(piece: Staged, before: Staged | None) -> Staged:
    """Return the piece with what leads to it from `before`, where that is smaller than the whole."""
    if before is None or (piece.name, piece.dtype, piece.shape) != (before.name, before.dtype, before.shape):
        return piece
    payload = delta.encode(before.payload, piece.payload, delta.word(piece.dtype))
    if payload is None:
        return piece
    return piece._replace(delta=Delta(payload, messages.digest(payload), before.digest))


class StagedWeights:
    """One rank's share. `stage` is for the main thread, all else for the thread that serves, which holds the lock."""

    def __init__(
        self,
        lock: threading.Condition,
        wait: Callable[[], None],
        fetch_seconds: float = inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """lock: of the server, which other threads hold too. wait: for its news, with the lock; raises if it ended.

        fetch_seconds: for how long, by the clock, a version that is in the way of a newer one is kept for whoever is in
        the middle of fetching it.
        """
        self.newest = -1
        """The version that was staged last."""
        self._lock, self._wait, self._fetch_seconds, self._clock = lock, wait, fetch_seconds, clock
        self._versions: dict[int, dict[int, Staged]] = {}
        self._bases: dict[int, messages.Base | None] = {}
        """By version, what its deltas are deltas of."""
        self._fetching: dict[int, set[int]] = {}
        """By version, the generating ranks that have begun and not ended to fetch it."""
        self._slow: set[int] = set()
        """Those for which one of them has been kept in vain: nobody waits for them again."""

    def stage(
        self, version: int, pieces: dict[int, Staged], base: messages.Base | None, waiting: AbstractContextManager
    ) -> None:
        """Keep these pieces, by their place among all weights, as `version`, and let go of versions before the last.

        base: what their deltas are deltas of. A version that somebody is in the middle of fetching is waited for,
        inside `waiting`, and not for ever.
        """
        with self._lock:
            # `or None`: would only this version be kept, [:-0] is none of them, and [:None] all.
            old, until = sorted(self._versions)[: -(KEPT_VERSIONS - 1) or None], self._clock() + self._fetch_seconds
            with waiting:
                while any(self._fetching[kept] - self._slow for kept in old) and self._clock() < until:
                    self._wait()
            for kept in old:
                self._slow |= self._fetching[kept]
                del self._versions[kept], self._bases[kept], self._fetching[kept]
            self._versions[version], self._bases[version], self._fetching[version] = pieces, base, set()
            self.newest = version

    def answer(self, message: messages.FromMember, may_hold: bool = True) -> list[bytes | memoryview]:
        """Return the frames that answer one of `messages.REQUESTS`. may_hold: whether a version is kept for it."""
        match message:
            case messages.FetchTensor(member, _, version, index, wants_delta):
                piece = self._versions.get(version, {}).get(index)
                if piece is None or member not in self._fetching[version]:
                    return [wire.encode(messages.Missing(version))]
                sent = piece.delta if wants_delta and piece.delta else Delta(piece.payload, piece.digest, None)
                described = piece.name, piece.dtype, piece.shape, sent.digest, piece.digest, sent.base
                return [wire.encode(messages.TensorMessage(version, index, *described)), sent.payload]
            case messages.Hold(member, _, version, base):
                if known := may_hold and version in self._versions:
                    self._fetching[version].add(member)
                deltas = known and base is not None and base == self._bases[version]
                return [wire.encode(messages.HoldReply(version, known, deltas))]
            case messages.Release(member, _, version):
                self._fetching.get(version, set()).discard(member)
                self._lock.notify_all()
        return []

    def forget(self, member: int) -> None:
        """Wait for this rank no more."""
        for members in (*self._fetching.values(), self._slow):
            members.discard(member)
