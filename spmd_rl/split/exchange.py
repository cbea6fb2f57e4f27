"""`Exchange`: what a training rank keeps for generating ranks to fetch, and what they have delivered to it.

A thread of its own answers them, so that they never wait for training. It keeps this rank's share of the newest version
of the weights and of the one before, until nobody is in the middle of fetching it.
"""

import contextlib
import os
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from spmd_rl import wire
from spmd_rl.config.sections.placement import PlacementConfig
from spmd_rl.curve_keys import HostKeys
from spmd_rl.distributed import World
from spmd_rl.errors import UserError
from spmd_rl.process import in_background
from spmd_rl.sidecar.authenticator import Authenticator
from spmd_rl.sidecar.event_loop import EventLoop
from spmd_rl.sidecar.sockets import claim_directory, received, remove_socket, socket_path
from spmd_rl.split import delta, messages

KEPT_VERSIONS = 2
WAIT_SECONDS = 0.2
"""The main thread's pause between two looks at whether the thread lives."""


def own_address() -> str:
    """Return the address of this machine at which the others of the job can reach it."""
    family, _, _, _, master = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(master)  # nothing is sent
        address = probe.getsockname()[0]
    return f"[{address}]" if ":" in address else address


def bind_of(settings: PlacementConfig, world: World) -> str:
    """Return where this rank's exchange listens: as `placement.bind` says, or in a private directory of the machine."""
    if settings.bind != "ipc":
        return settings.bind
    folder = Path(world.node.address.removeprefix("ipc://")).parent
    return f"ipc://{folder.with_name(folder.name + '-x')}/{secrets.token_hex(4)}"


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


class Exchange:
    """Serves until it is closed. All methods but the thread's are for the main thread."""

    codec = messages.TO_TRAINER

    def __init__(self, bind: str, keys: HostKeys | None = None) -> None:
        """bind: an `ipc://` path in a directory of this user's alone, or `tcp://ADDRESS`, whose port is any free one.

        keys: whose clients alone are served. UserError if nothing can listen there.
        """
        self.newest = -1
        """The version that was staged last."""
        self._lock = threading.Condition()
        self._versions: dict[int, dict[int, Staged]] = {}
        self._bases: dict[int, messages.Base | None] = {}
        """By version, what its deltas are deltas of."""
        self._fetching: dict[int, set[int]] = defaultdict(set)
        """By version, the generating ranks that have begun and not ended to fetch it."""
        self._delivered: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
        self._left: dict[tuple[int, int], bytes] = {}
        """By slice, what has been begun of it."""
        self._context, self._loop = zmq.Context(), EventLoop()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            Authenticator(self._context, keys, self._loop)
            keys.secure(self._socket)
        self.address = self._listen(bind)
        self._loop.watch(self._socket, self._receive)
        self._closing = False
        self._served = in_background("exchange", self._serve)

    def _listen(self, bind: str) -> str:
        """Listen; the address at which this rank can be reached."""
        try:
            if path := socket_path(bind):
                claim_directory(path.parent)
                self._socket.bind(bind)
                return bind
            port = self._socket.bind_to_random_port(bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(f"placement.bind: cannot listen on {bind}: {error.strerror}") from None
        return f"{bind.replace('*', own_address()) if '*' in bind else bind}:{port}"

    def stage(
        self,
        version: int,
        pieces: dict[int, Staged],
        base: messages.Base | None,
        waiting: contextlib.AbstractContextManager,
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

    def leave(self, slices: Mapping[tuple[int, int], bytes]) -> None:
        """Let others take what has been begun of these slices."""
        with self._lock:
            self._left.update(slices)

    def take(self, kind: str, number: int, senders: Sequence[int]) -> dict[int, bytes]:
        """Wait until all `senders` have delivered this; return it by sender, and forget it here."""
        with self._lock:
            while not set(senders) <= set(self._delivered[kind, number]):
                self._wait()
            return self._delivered.pop((kind, number))

    def close(self) -> None:
        """Stop serving; idempotent. Raises what ended the thread, if anything did."""
        self._closing = True
        try:
            self._served.result()
        finally:
            remove_socket(self.address)

    def _wait(self) -> None:
        """Wait for news from the thread, a moment at most; raise what ended it."""
        if self._served.done():
            self._served.result()
            raise AssertionError("the exchange has been closed")
        self._lock.wait(WAIT_SECONDS)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._loop.run_once(busy=False)
        finally:
            self._context.destroy(linger=0)

    def _receive(self) -> None:
        for peer, header, *payload in received(self._socket, copy=False):
            self._answer(peer.bytes, self.codec.decode(header.bytes), payload)

    def _answer(self, peer: bytes, message: wire.Message, payload: list[zmq.Frame]) -> None:
        match message:
            case messages.GetPiece(version, index, wants_delta):
                with self._lock:
                    piece = self._versions[version][index]
                sent = piece.delta if wants_delta and piece.delta else Delta(piece.payload, piece.digest, None)
                described = piece.name, piece.dtype, piece.shape, sent.digest, piece.digest, sent.base
                header = messages.Piece(version, index, *described)
                self._socket.send_multipart([peer, wire.encode(header), sent.payload], copy=False)
            case messages.Delivery(kind, number, sender, digest):
                content = payload[0].bytes
                assert messages.digest(content) == digest, f"{kind} {number} of generating rank {sender} arrived broken"
                with self._lock:
                    self._delivered[kind, number][sender] = content
                    self._lock.notify_all()
                self._socket.send_multipart([peer, wire.encode(messages.Received(kind, number))])
            case messages.Begin(version, sender, base):
                with self._lock:
                    known = version in self._versions
                    if known:
                        self._fetching[version].add(sender)
                    deltas = known and base is not None and base == self._bases[version]
                reply = messages.Begun(version, known, deltas)
                self._socket.send_multipart([peer, wire.encode(reply)])
            case messages.TakeSlice(ticket, number):
                with self._lock:
                    content = self._left.pop((ticket, number))
                header = messages.LeftSlice(ticket, number, messages.digest(content))
                self._socket.send_multipart([peer, wire.encode(header), content])
            case messages.Fetched(version, sender):
                with self._lock:
                    self._fetching[version].discard(sender)
                    self._lock.notify_all()
