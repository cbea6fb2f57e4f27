"""Frames over a stream socket between a process and the one it started: a 4-byte length, then the frame.

Blocking `send` and `receive` for workers; `Channel` for the host, which must never wait for one of many.
"""

import contextlib
import socket
import struct
from typing import Any

import msgspec

from spmd_rl import wire

FORK = b"f"
"""What the host sends to a zygote together with a socket: no frame, since descriptors travel beside it."""
RECEIVE_BYTES = 1 << 18
_LENGTH = struct.Struct("<I")


def send(sock: socket.socket, message: msgspec.Struct) -> None:
    """Write one frame, blocking. OSError if the other side is gone."""
    frame = wire.encode(message)
    sock.sendall(_LENGTH.pack(len(frame)) + frame)


def receive(sock: socket.socket, codec: wire.Codec) -> Any | None:
    """Read exactly one frame, blocking; None when the other side is gone. WireError as `decode`."""
    header = _exactly(sock, _LENGTH.size)
    if header is None:
        return None
    frame = _exactly(sock, _checked(_LENGTH.unpack(header)[0]))
    return None if frame is None else codec.decode(frame)


def _exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = sock.recv(num_bytes - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _checked(num_bytes: int) -> int:
    if num_bytes > wire.MAX_FRAME_BYTES:
        raise wire.WireError(f"a frame of {num_bytes} bytes; at most {wire.MAX_FRAME_BYTES} travel")
    return num_bytes


class Channel:
    """One end that never blocks: what cannot be written yet is kept, what has not arrived whole is kept."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._unread = bytearray()
        self._unsent = bytearray()

    @property
    def stuck(self) -> bool:
        """Whether bytes wait until the socket can be written again."""
        return bool(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one frame and write what can be written. A peer that is gone is found out by `receive`."""
        frame = wire.encode(message)
        self._unsent += _LENGTH.pack(len(frame)) + frame
        self.flush()

    def flush(self) -> None:
        """Write what can be written."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def receive(self, codec: wire.Codec) -> tuple[list[Any], bool]:
        """All messages that have arrived, and whether the peer is gone. WireError as `decode`."""
        gone = False
        while True:
            try:
                chunk = self.socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                gone = True
                break
            self._unread += chunk
            if len(chunk) < RECEIVE_BYTES:
                break  # most likely all; the selector tells of the rest
        return self._take(codec), gone

    def _take(self, codec: wire.Codec) -> list[Any]:
        messages, start = [], 0
        while len(self._unread) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _checked(_LENGTH.unpack_from(self._unread, start)[0])
            if len(self._unread) < end:
                break
            messages.append(codec.decode(bytes(self._unread[begin:end])))
            start = end
        del self._unread[:start]
        return messages
