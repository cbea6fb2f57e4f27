"""The socket between tests and the code that they test: frames of a length and a body of JSON."""

import os
import struct

from spmd_rl.sandbox.guest.values import dumps, loads

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16


class Gone(Exception):
    """Raised when nothing more can come from the other side."""


class Link:
    """One end. Either side may be gone at any time; the tests' side believes nothing about the length of a frame."""

    def __init__(self, fd, most):
        """`most`: the number of bytes that one message may have."""
        self._fd, self._most = fd, most
        self._data = bytearray()  # read, and of a later message

    def send(self, message):
        """Send a message. Gone if nobody reads, MemoryError or ValueError if it or a number in it is too long."""
        body = dumps(message)
        if len(body) > self._most:
            raise MemoryError(f"{len(body)} bytes; a message has at most {self._most}")
        data = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            raise Gone("the code is gone") from None

    def receive(self):
        """Return one message. Gone if there is none, or one that is too long or malformed."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > self._most:
            raise Gone(f"a message of {size} bytes; it has at most {self._most}")
        try:
            return loads(self._read(size))
        except (ValueError, RecursionError):
            raise Gone("a malformed message") from None

    def _read(self, size):
        while len(self._data) < size:
            try:
                chunk = os.read(self._fd, _CHUNK)
            except OSError:
                chunk = b""
            if not chunk:
                raise Gone("the code is gone")
            self._data += chunk
        found = bytes(self._data[:size])
        del self._data[:size]
        return found
