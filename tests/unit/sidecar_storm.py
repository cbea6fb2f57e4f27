"""Attacks of an outsider on the wire of a host with keys, each a loop until the time is over.

python -m tests.unit.sidecar_storm ADDRESS SECONDS CONNECTIONS KEYS     KEYS: a directory whose server key is the host's
"""

import contextlib
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator

import zmq

from spmd_rl.base.curve_keys import ClientKeys
from spmd_rl.sidecar import wire

GREETING, CURVE = (
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + name.ljust(20, b"\0") + bytes(32) for name in (b"NULL", b"CURVE")
)
"""Greetings of ZMTP 3."""
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
PING = b"\x04\x07\x04PING\x00\x00"


class Target:
    """The host under attack."""

    def __init__(self, address: str, seconds: float, connections: int, keys: str) -> None:
        self.address, self.connections = address, connections
        self.keys = ClientKeys.load(keys)
        self.until = time.monotonic() + seconds

    def open(self) -> bool:
        """Return whether there is time left."""
        return time.monotonic() < self.until

    def raw(self) -> socket.socket:
        """Return a plain connection. OSError while nobody listens."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=1.0)

    @contextlib.contextmanager
    def dealer(self, secret: bytes) -> Iterator[zmq.Socket]:
        """Yield a DEALER with that key of its own, which the host does not list."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            for name, value in {"LINGER": 0, "SNDTIMEO": 300, "RCVTIMEO": 300}.items():
                sock.setsockopt(getattr(zmq, name), value)
            ClientKeys(self.keys.server, secret).secure(sock)
            sock.connect(self.address)
            with contextlib.suppress(zmq.Again):
                yield sock


def garbage(target: Target) -> None:
    """Send random bytes, with and without a greeting before them; then hang up."""
    dice = random.Random(1)
    while target.open():
        with contextlib.suppress(OSError), target.raw() as sock:
            sock.sendall(dice.choice((b"", GREETING, CURVE, GREETING + READY)) + dice.randbytes(dice.randrange(5000)))


def hang_up(target: Target) -> None:
    """Send messages that pile up, heartbeats behind them, and hang up before the answer: it has made libzmq abort."""
    frame = wire.encode(wire.Ping())
    message = bytes((0, len(frame))) + frame
    while target.open():
        with contextlib.suppress(OSError), target.raw() as sock:
            sock.sendall(GREETING + READY + message * 4000 + PING * 50)


def silence(target: Target) -> None:
    """Hold connections that say nothing, or the beginning of a greeting, as many as are granted."""
    held: list[socket.socket] = []
    while target.open():
        try:
            held.append(target.raw())
            held[-1].sendall(CURVE[: len(held) % len(CURVE)])
        except OSError:
            time.sleep(0.05)
        if len(held) >= target.connections:
            time.sleep(0.2)
            for sock in held[: len(held) // 8]:
                sock.close()
            del held[: len(held) // 8]


def large_commands(target: Target) -> None:
    """Begin the handshake with a command of 10 MB, and with one of a terabyte."""
    while target.open():
        for size in (wire.MAX_FRAME_BYTES - 100, 1 << 40):
            with contextlib.suppress(OSError), target.raw() as sock:
                sock.sendall(CURVE + b"\x06" + size.to_bytes(8) + bytes(min(size, 4 << 20)))


def unlisted(target: Target) -> None:
    """Prove a key that is not listed, again and again, and ask all the same."""
    while target.open():
        with target.dealer(zmq.curve_keypair()[1]) as sock:
            for _ in range(1000):
                sock.send(wire.encode(wire.GetStatus()))
            sock.recv()


ATTACKS = (garbage, hang_up, silence, large_commands, unlisted)


def main(address: str, seconds: str, connections: str, keys: str) -> None:
    """Run the attacks at once, each in a thread."""
    target = Target(address, float(seconds), int(connections), keys)
    threads = [threading.Thread(target=attack, args=(target,), daemon=True) for attack in ATTACKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, target.until - time.monotonic()) + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
