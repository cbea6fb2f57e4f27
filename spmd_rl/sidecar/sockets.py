"""ZeroMQ sockets of a sidecar, with limits and keys, and the private directory of an `ipc://` address."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from spmd_rl.base.curve_keys import ZAP_DOMAIN, ClientKeys, HostKeys, limit_connection
from spmd_rl.base.errors import UserError
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.event_loop import EventLoop

BACKLOG = 1024
FRAMES_PER_ROUND = 64
"""Frames read before other sockets get their turn."""


def open_dealer(
    context: zmq.Context, address: str, keys: ClientKeys | None, only_connected: bool = False
) -> zmq.Socket:
    """Connect a DEALER to the host at `address`. only_connected: queue nothing for an absent host. ZMQError if the
    address is malformed.
    """
    dealer = context.socket(zmq.DEALER)
    # A fixed id: after a reconnect the host sees the same peer.
    dealer.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, int(only_connected))
    dealer.setsockopt(zmq.SNDHWM, wire.WINDOW)
    dealer.setsockopt(zmq.RCVHWM, 4 * wire.WINDOW)
    dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    limit_connection(dealer, address)
    if keys is not None:
        keys.secure(dealer)
    dealer.connect(address)
    return dealer


def open_router(
    context: zmq.Context, keys: HostKeys | None, address: str, max_bytes: int, max_unsent: int
) -> tuple[zmq.Socket, str]:
    """Bind a ROUTER at an address that passed `check_address`; return it and the address, with a port.

    max_bytes: of a frame. max_unsent: messages that wait for one peer. UserError if the address is taken or its
    directory is not ours.
    """
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, max_unsent)
    router.setsockopt(zmq.BACKLOG, BACKLOG)
    router.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # By default a ROUTER rejects an id that it knows: a client could not reconnect before its old connection times out.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    limit_connection(router, address)
    if keys is not None:
        keys.secure(router)
    try:
        if path := socket_path(address):
            claim_directory(path.parent)
            path.unlink(missing_ok=True)
        router.bind(address)
    except (OSError, zmq.ZMQError) as error:
        raise UserError(f"sidecar: cannot listen on {address}: {error.strerror}") from None
    if path is None:
        port = router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        address = f"{address.rpartition(':')[0]}:{port}"
    return router, address


def send(dealer: zmq.Socket, message: msgspec.Struct) -> bool:
    """Send a message without blocking; False if the queue is full."""
    try:
        dealer.send(wire.encode(message), zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def received(sock: zmq.Socket, limit: int = FRAMES_PER_ROUND) -> Iterator[list[bytes]]:
    """Yield the multipart messages that have arrived, at most `limit`."""
    for _ in range(limit):
        try:
            yield sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def socket_path(address: str) -> Path | None:
    """Return the path of an `ipc://` address, else None."""
    return Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None


def claim_directory(path: Path) -> None:
    """Create a directory that only we can enter. UserError if it exists and others own or may enter it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(f"the sidecar's directory {path} must be a directory of your own with mode 0700")


def remove_socket(address: str) -> None:
    """Remove an ended host's socket file, and its directory if empty."""
    if path := socket_path(address):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()


class Authenticator:
    """Admits the keys of `HostKeys.allowed` (ZAP, ZeroMQ RFC 27). Create it before the sockets that it guards."""

    def __init__(self, context: zmq.Context, keys: HostKeys, loop: EventLoop) -> None:
        self.refused = 0
        self._allowed = keys.allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        loop.watch(self._socket, self._answer)

    def _answer(self) -> None:
        for version, id_, domain, _address, _identity, mechanism, *credentials in received(self._socket):
            checked = mechanism == b"CURVE" and domain == ZAP_DOMAIN and len(credentials) == 1
            name = self._allowed.get(credentials[0]) if checked else None
            self.refused += name is None
            code, text = (b"400", b"not listed") if name is None else (b"200", b"OK")
            self._socket.send_multipart([version, id_, code, text, (name or "").encode(), b""])
