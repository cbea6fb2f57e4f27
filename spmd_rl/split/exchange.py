"""`Exchange`: what a training rank keeps for generating ranks to fetch, and what they have delivered to it.

A thread of its own answers them, so that they never wait for training.
"""

import os
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from spmd_rl.split import messages
from spmd_rl.weights.messages import digest
from spmd_rl.weights.staged import StagedWeights

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


class Exchange:
    """Serves until it is closed. All methods but the thread's are for the main thread."""

    codec = messages.TO_TRAINER

    def __init__(self, bind: str, keys: HostKeys | None = None) -> None:
        """bind: an `ipc://` path in a directory of this user's alone, or `tcp://ADDRESS`, whose port is any free one.

        keys: whose clients alone are served. UserError if nothing can listen there.
        """
        self._lock = threading.Condition()
        self.weights = StagedWeights(self._lock, self._wait)
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
            with self._lock:
                self._answer(peer.bytes, self.codec.decode(header.bytes), payload)

    def _answer(self, peer: bytes, message: wire.WireMessage, payload: list[zmq.Frame]) -> None:
        match message:
            case messages.Delivery(kind, number, sender, expected):
                content = payload[0].bytes
                assert digest(content) == expected, f"{kind} {number} of generating rank {sender} arrived broken"
                self._delivered[kind, number][sender] = content
                self._lock.notify_all()
                self._socket.send_multipart([peer, wire.encode(messages.Received(kind, number))])
            case messages.TakeSlice(ticket, number):
                content = self._left.pop((ticket, number))
                header = messages.LeftSlice(ticket, number, digest(content))
                self._socket.send_multipart([peer, wire.encode(header), content])
            case _ if frames := self.weights.answer(message):
                self._socket.send_multipart([peer, *frames], copy=False)
