"""Attacks on the wire of a host, each a loop until the time is over: what garbage, crowds and listed keys can do.

python -m tests.unit.sidecar_storm ADDRESS SECONDS KEYS ATTACK [ATTACK ...]     KEYS: a directory, or - for none
"""

import contextlib
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator

import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys
from spmd_rl.types import AnswerInfo, Message, Prompt, Verdict

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
PING = b"\x04\x07\x04PING\x00\x00"


class Target:
    """The host under attack."""

    def __init__(self, address: str, seconds: float, keys: str) -> None:
        self.address = address
        self.keys = None if keys == "-" else ClientKeys.load(keys)
        self.until = time.monotonic() + seconds

    def open(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self.until

    def raw(self) -> socket.socket:
        """A plain connection. OSError while nobody listens."""
        if self.address.startswith("ipc://"):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(1.0)
            sock.connect(self.address.removeprefix("ipc://"))
            return sock
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=1.0)

    @contextlib.contextmanager
    def dealer(self, **options: int) -> Iterator[zmq.Socket]:
        """A DEALER, with our keys if there are any."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            for name, value in {"LINGER": 0, "SNDTIMEO": 300, "RCVTIMEO": 300, **options}.items():
                sock.setsockopt(getattr(zmq, name), value)
            if self.keys is not None:
                self.keys.secure(sock)
            sock.connect(self.address)
            with contextlib.suppress(zmq.Again):
                yield sock


def garbage(target: Target) -> None:
    """Random bytes, with and without a greeting before them; then it hangs up."""
    dice = random.Random(1)
    while target.open():
        with contextlib.suppress(OSError), target.raw() as sock:
            sock.sendall(dice.choice((b"", GREETING, GREETING + READY)) + dice.randbytes(dice.randrange(5000)))


def hang_up(target: Target) -> None:
    """Messages that pile up, a heartbeat behind them, and nobody there for the answer: what libzmq aborts at."""
    frame = wire.encode(wire.Ping())
    message = bytes((0, len(frame))) + frame
    while target.open():
        with contextlib.suppress(OSError), target.raw() as sock:
            sock.sendall(GREETING + READY + message * 4000 + PING * 50)


def silence(target: Target) -> None:
    """Connections that say nothing, or the beginning of a greeting, as many as there can be."""
    held: list[socket.socket] = []
    while target.open():
        try:
            held.append(target.raw())
            held[-1].sendall(GREETING[: len(held) % 12])
        except OSError:
            time.sleep(0.05)
        if len(held) > 2000:
            for sock in held:
                sock.close()
            held.clear()


def large_parts(target: Target) -> None:
    """A message of 150 parts of 8 MB."""
    part = bytes(8 << 20)
    while target.open():
        with target.dealer() as sock:
            sock.send_multipart([part] * 150, copy=False)
            sock.recv()
            time.sleep(1.0)


def tiny_parts(target: Target) -> None:
    """A message of three million tiny parts, straight from a socket where no key is needed."""
    while target.open():
        if target.keys is None:
            with contextlib.suppress(OSError), target.raw() as sock:
                sock.sendall(GREETING + READY)
                for _ in range(300):
                    sock.sendall(b"\x01\x01x" * 10_000)
        else:
            with target.dealer() as sock:
                sock.send_multipart([b"x"] * 300_000)  # not sent before it is whole, and ours to hold
                sock.recv()


def large_frames(target: Target) -> None:
    """Frames as large as they may be, which mean nothing or unpack into millions of objects."""
    size = wire.MAX_FRAME_BYTES - 100
    nested = b"\x01\x92\xaescore_requests\xdd" + struct.pack(">I", size) + b"\x90" * size
    frames = [bytes(size), b"\x01" + b"\x91" * size, nested[:size], b"\x01\x92\xadcancel_scores\xdd" + bytes(size)]
    while target.open():
        with target.dealer(SNDHWM=4) as sock:
            for frame in frames:
                sock.send(frame, copy=False)
            sock.recv()


def bombs(target: Target) -> None:
    """Requests whose prompt is made of a million empty lists, and what is cancelled as soon as it was asked."""
    prompt = b"\xdd" + struct.pack(">I", 1 << 20) + b"\x90" * (1 << 20)
    bomb = wire.pack([wire.msgspec.Raw(prompt), "a", AnswerInfo(1, "stop")])
    large = wire.pack(
        wire.ScoreInput(Prompt("0", (Message("user", "x" * 1_000_000),), "toy", ""), "a", AnswerInfo(1, ""))
    )
    number = 0
    while target.open():
        with target.dealer(SNDHWM=4) as sock:
            for packed in (bomb, large):
                number += 1
                sock.send(wire.encode(wire.ScoreRequests([wire.ScoreRequest(number, "toy", 1.0, packed)])))
                sock.send(wire.encode(wire.CancelScores([number])))
            time.sleep(0.02)


def deafness(target: Target) -> None:
    """A peer that asks as fast as it can and reads no answer."""
    while target.open():
        with target.dealer(RCVHWM=1) as sock:
            for _ in range(5000):
                sock.send(wire.encode(wire.GetStatus()))
                sock.send(b"\x02garbage")


def bad_nodes(target: Target) -> None:
    """Worker nodes that answer nonsense or nothing, under names that a terminal would act on."""
    for number in range(1_000_000):
        if not target.open():
            return
        with target.dealer() as sock:
            sock.send(wire.encode(wire.NodeJoin(f"\x1b[2Jnode {number}", ["toy"])))
            welcome = wire.TO_NODE.decode(sock.recv())
            if not isinstance(welcome, wire.NodeWelcome):
                continue
            given: list[int] = []
            for _ in range(5):
                sock.send(wire.encode(wire.NodeHeartbeat(welcome.host, {"toy": 50}, given)))
                with contextlib.suppress(zmq.Again):
                    while isinstance(message := wire.TO_NODE.decode(sock.recv()), wire.Pong | wire.ScoreRequests):
                        given += [item.id for item in getattr(message, "items", [])]
            if number % 2:  # else it keeps silent about what it was given
                nonsense = [Verdict("ok", float("nan")), Verdict("ok", 1.0, {"\x1b": 1.0}), "ok"][number % 3]
                items = [wire.NodeReply(id_, wire.pack(nonsense)) for id_ in given]
                sock.send(wire.encode(wire.NodeReplies(items)))
                time.sleep(0.1)


def main(address: str, seconds: str, keys: str, *names: str) -> None:
    """Run the attacks at once, each in a thread."""
    target = Target(address, float(seconds), keys)
    threads = [threading.Thread(target=globals()[name], args=(target,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, target.until - time.monotonic()) + 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
