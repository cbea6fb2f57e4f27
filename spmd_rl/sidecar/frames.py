"""Frames over a stream socket between a process and its child: a 4-byte length, then the frame.

`send_frame` and `receive_frame` block (children); `FrameSocket` never blocks (host).
"""

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from spmd_rl.sidecar import wire

FORK = b"f"
RECEIVE_BYTES = 1 << 18
_LENGTH = struct.Struct("<I")


def start_child(
    module: str, message: msgspec.Struct, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen, socket.socket]:
    """Run `python -m <module> <fd>` with a socket to us at `fd`, and send it its first message.

    Return the process and our end, which reads as closed if the child dies. WireError if the message cannot be encoded,
    OSError if the process cannot start.
    """
    frame = _with_length(message)
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        # In a group of its own: torchrun signals the group of a rank, which still needs its sidecar for the step.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, process_group=0
        )
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        ours.sendall(frame)
    return process, ours


def send_frame(sock: socket.socket, message: msgspec.Struct) -> None:
    """Write one frame; blocks. OSError if the peer is gone."""
    sock.sendall(_with_length(message))


def receive_frame(sock: socket.socket, codec: wire.Codec) -> Any | None:
    """Read one frame; blocks. None if the peer is gone. WireError as in `Codec.decode`."""
    header = _read_exactly(sock, _LENGTH.size)
    if header is None:
        return None
    frame = _read_exactly(sock, _checked_length(header))
    return None if frame is None else codec.decode(frame)


class FrameSocket:
    """Non-blocking socket; buffers unsent bytes and incomplete frames."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._unread = bytearray()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        """True if bytes wait until the socket is writable."""
        return bool(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a frame and write what is possible. `receive` reports a lost peer."""
        self._unsent += _with_length(message)
        self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def receive(self, codec: wire.Codec) -> tuple[list[Any], bool]:
        """Return the complete messages, and True if the peer is gone. WireError as in `Codec.decode`."""
        gone = False
        try:
            # One read per round; the event loop calls again if there is more, and other sockets get their turn.
            chunk = self.socket.recv(RECEIVE_BYTES)
            gone = not chunk
            self._unread += chunk
        except BlockingIOError:
            pass
        except ConnectionResetError:
            gone = True
        messages = []
        while len(self._unread) >= _LENGTH.size:
            end = _LENGTH.size + _checked_length(self._unread[: _LENGTH.size])
            if len(self._unread) < end:
                break
            messages.append(codec.decode(bytes(self._unread[_LENGTH.size : end])))
            del self._unread[:end]
        return messages, gone


def _with_length(message: msgspec.Struct) -> bytes:
    frame = wire.encode(message)
    return _LENGTH.pack(len(frame)) + frame


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = sock.recv(num_bytes - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _checked_length(header: bytes) -> int:
    (num_bytes,) = _LENGTH.unpack(header)
    if num_bytes > wire.MAX_FRAME_BYTES:
        raise wire.WireError(f"a frame of {num_bytes} bytes exceeds the limit of {wire.MAX_FRAME_BYTES}")
    return num_bytes
