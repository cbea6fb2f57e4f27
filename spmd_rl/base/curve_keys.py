"""Addresses and CURVE keys of sidecar hosts: who may reach one. `python -m spmd_rl sidecar_keys` makes the keys.

    DIR/server.secret  DIR/allowed                      the host's key, and the public keys that it serves
    DIR/client.secret  DIR/server.public                the ranks' key, and their host's
    DIR/<node>/client.secret  DIR/<node>/server.public  another client's, the only part of DIR that it needs

CURVE (CurveZMQ, ZeroMQ RFC 26) encrypts the traffic and proves each side's key to the other. A key is 40 characters of
Z85.
"""

import ipaddress
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from spmd_rl.base.errors import UserError

SERVER_SECRET, SERVER_PUBLIC, CLIENT_SECRET, ALLOWED = "server.secret", "server.public", "client.secret", "allowed"
ZAP_DOMAIN = b"sidecar"
HANDSHAKE_MS = 5_000
"""Limit of a connection without a proved key."""
LOST_MS = 10_000
"""Limit of a TCP connection whose peer confirms nothing."""
_TCP = re.compile(r"tcp://(\*|\[[^]]+]|[0-9.]+)(?::(\d{1,5}))?")


def check_bind(bind: str, keyed: bool) -> None:
    """Raise UserError unless a sidecar may listen at `bind`: `ipc`, loopback, or with keys any local address."""
    if bind == "ipc":
        return
    match = _TCP.fullmatch(bind)
    if match is None or not (match[1] == "*" or is_address(match[1])):
        raise UserError(f"bind: must be ipc or tcp://ADDRESS:PORT, with a numeric ADDRESS or *, not {bind!r}")
    if match[2] is None or not 0 < int(match[2]) < 65536:
        raise UserError(f"bind: {bind} needs a port: tcp://{match[1]}:5555")
    if not keyed and not on_loopback(bind):
        raise UserError(
            f"bind: {bind}: beyond this machine a sidecar needs sidecar.keys, a directory of CURVE keys with an "
            "allow-list; python -m spmd_rl sidecar_keys DIR makes one"
        )


def check_connect(key: str, address: str) -> None:
    """Raise UserError, which names `key`, unless `address` has the form `tcp://HOST:PORT`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    named = re.fullmatch(r"[\w.-]+", host, re.ASCII) or is_address(host)
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536
    if not (address.startswith("tcp://") and named and is_port):
        raise UserError(f"{key}: must be tcp://HOST:PORT, not {address!r}")


def on_loopback(address: str) -> bool:
    """Return True if only this machine can reach a TCP address."""
    match = _TCP.fullmatch(address)
    return match is not None and is_address(match[1]) and ipaddress.ip_address(match[1].strip("[]")).is_loopback


def local_address(bind: str) -> str:
    """Return the address of `bind` for processes of this machine."""
    return bind.replace("//*:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def is_address(text: str) -> bool:
    """Return True for an IP address, in brackets or not."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class HostKeys:
    """The keys of a host: its own and those that it serves."""

    secret: bytes
    allowed: dict[bytes, str]
    """Clients' names by public key (32 raw bytes)."""

    @classmethod
    def load(cls, directory: str | Path, key: str = "sidecar.keys") -> "HostKeys":
        """Load them. UserError, which names the setting `key`, for a file that is missing, not private, or no key."""
        secret = _read_key(Path(directory, SERVER_SECRET), key, private=True)
        path = Path(directory, ALLOWED)
        allowed = {}
        for number, line in enumerate(_read(path, key, private=True).splitlines(), 1):
            public, _, name = line.strip().partition(" ")
            # "#" is also one of the characters of a Z85 key, so only a separate "#" marks a comment.
            if public not in ("", "#"):
                allowed[z85.decode(_key(public, f"{key}: {path}:{number}"))] = name.strip()
        if not allowed:
            raise UserError(
                f"{key}: {path} lists no key; python -m spmd_rl sidecar_keys {directory} makes and lists one"
            )
        return cls(secret, allowed)

    def secure(self, router: zmq.Socket) -> None:
        """Make the socket prove our key and ask the context's ZAP handler about each peer's. Call it before `bind`."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without ENFORCE_DOMAIN libzmq skips the check where no ZAP handler is bound, and would serve every key.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of a rank or a status request: its own and the host's."""

    server: bytes
    secret: bytes

    @classmethod
    def load(cls, directory: str | Path, key: str = "sidecar.keys") -> "ClientKeys":
        """Load them. UserError as in `HostKeys.load`."""
        server = _read_key(Path(directory, SERVER_PUBLIC), key, private=False)
        return cls(server, _read_key(Path(directory, CLIENT_SECRET), key, private=True))

    def secure(self, dealer: zmq.Socket) -> None:
        """Make the socket talk only to the host with the server key. Call it before `connect`."""
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.secret))
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def limit_connection(socket: zmq.Socket, address: str) -> None:
    """Close connections whose peer stalls or is gone. Call it before `bind` or `connect`."""
    # The kernel's timeouts, not libzmq's heartbeats: those abort the process when one is due on a connection that was
    # lost while its input had stopped (`!_io_error` in `stream_engine_base.cpp`).
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if address.startswith("tcp://"):
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.setsockopt(zmq.TCP_MAXRT, LOST_MS)
        for option, value in ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 5), (zmq.TCP_KEEPALIVE_INTVL, 2)):
            socket.setsockopt(option, value)


def _read_key(path: Path, key: str, private: bool) -> bytes:
    return _key(_read(path, key, private).strip(), f"{key}: {path}")


def _read(path: Path, key: str, private: bool) -> str:
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            # The open file is checked, not its name: it cannot be swapped in between.
            if status.st_uid not in (os.geteuid(), 0) or mode & (0o077 if private else 0o022):
                raise UserError(f"{key}: {path} must be your own, with mode 0600; it has {mode:04o}")
            return file.read(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text"
        raise UserError(f"{key}: {path}: {why}; python -m spmd_rl sidecar_keys DIR makes such a directory") from None


def _key(text: str, where: str) -> bytes:
    try:
        if len(text) == 40 and len(z85.decode(text.encode("ascii"))) == 32:
            return text.encode("ascii")
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{where} is not a CURVE key, which has 40 characters of Z85")
