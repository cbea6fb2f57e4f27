"""The socket between tests and their program: frames of a length and a JSON body."""

import os
import struct

from spmd_rl.sandbox.guest.values import FAULTS, dumps, loads

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16


class Gone(Exception):
    """Error if the other side has gone, or sent an unreadable message."""


class Link:
    """One end of the socket. The other side may go at any time, and send anything."""

    def __init__(self, fd, most):
        """most: limit of a message in bytes."""
        self._fd, self._most = fd, most

    def send(self, message):
        """Send a message. Gone without a reader, MemoryError or ValueError if it or a number in it is too long."""
        body = dumps(message)
        if len(body) > self._most:
            raise MemoryError(f"{len(body)} bytes; a message has at most {self._most}")
        data = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            raise Gone("the program is gone") from None

    def receive(self):
        """Return the next message. Gone if none comes, or a too long or malformed one."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > self._most:
            raise Gone(f"a message of {size} bytes; it has at most {self._most}")
        try:
            return loads(self._read(size))
        except FAULTS:
            raise Gone("a malformed message") from None

    def _read(self, size):
        data = bytearray()
        while len(data) < size:
            try:
                chunk = os.read(self._fd, min(size - len(data), _CHUNK))
            except OSError:
                chunk = b""
            if not chunk:
                raise Gone("the program is gone")
            data += chunk
        return bytes(data)
