"""`StagedWeights`: versions of the weights that a training rank keeps in host memory until others have fetched them.

It keeps this rank's share of the newest version and of the one before, until nobody is in the middle of fetching it.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from spmd_rl import wire
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
    """Of one rank. `stage` is for the main thread, all else for the thread that serves, which holds the lock."""

    def __init__(self, lock: threading.Condition, wait: Callable[[], None]) -> None:
        """lock: of the server, which other threads hold too. wait: for its news, with the lock; raises if it ended."""
        self.newest = -1
        """The version that was staged last."""
        self._lock, self._wait = lock, wait
        self._versions: dict[int, dict[int, Staged]] = {}
        self._bases: dict[int, messages.Base | None] = {}
        """By version, what its deltas are deltas of."""
        self._fetching: dict[int, set[int]] = defaultdict(set)
        """By version, the generating ranks that have begun and not ended to fetch it."""

    def stage(
        self, version: int, pieces: dict[int, Staged], base: messages.Base | None, waiting: AbstractContextManager
    ) -> None:
        """Keep these pieces, by their place among all weights, as `version`, and let go of versions before the last.

        base: what their deltas are deltas of. A version that somebody is in the middle of fetching is waited for,
        inside `waiting`.
        """
        with self._lock:
            old = sorted(self._versions)[: -(KEPT_VERSIONS - 1) or None]
            with waiting:
                while any(self._fetching[kept] for kept in old):
                    self._wait()
            for kept in old:
                del self._versions[kept], self._bases[kept]
                self._fetching.pop(kept, None)
            self._versions[version], self._bases[version] = pieces, base
            self.newest = version

    def keeps(self, version: int, index: int) -> bool:
        """Return whether this piece of a version is here."""
        return index in self._versions.get(version, {})

    def answer(self, message: wire.WireMessage) -> list[bytes | memoryview]:
        """Return the frames that answer one of `messages.REQUESTS`. LookupError for a piece that is not here."""
        match message:
            case messages.FetchPiece(version, index, wants_delta):
                piece = self._versions[version][index]
                sent = piece.delta if wants_delta and piece.delta else Delta(piece.payload, piece.digest, None)
                described = piece.name, piece.dtype, piece.shape, sent.digest, piece.digest, sent.base
                return [wire.encode(messages.Piece(version, index, *described)), sent.payload]
            case messages.Hold(version, sender, base):
                if known := version in self._versions:
                    self._fetching[version].add(sender)
                deltas = known and base is not None and base == self._bases[version]
                return [wire.encode(messages.Held(version, known, deltas))]
            case messages.Release(version, sender):
                self._fetching[version].discard(sender)
                self._lock.notify_all()
        return []

    def forget(self, sender: int) -> None:
        """Wait for this rank no more."""
        for fetching in self._fetching.values():
            fetching.discard(sender)
