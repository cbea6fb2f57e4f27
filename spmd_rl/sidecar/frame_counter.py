"""Counts the frames of one direction of a ZMTP 3 connection (ZeroMQ RFC 23): a greeting of 64 bytes, then frames.

Only their headers are read, which are in clear with and without CURVE.
"""

from collections import deque

from spmd_rl import wire

GREETING_BYTES = 64
CURVE_BYTES = 33
"""The length that CURVE adds to a frame (RFC 26): command, nonce, authenticator, flags."""
FRAME_COST = 64
"""The bytes that libzmq takes for a frame, beside its content."""
SPARE_BYTES, PEER_FRAMES = 1 << 20, 128
"""What one connection may have sent that is not read, beside one frame of the largest size; it is not read from
beyond."""


class BadFrame(ValueError):
    """Raised for bytes that are not ZMTP 3 or a frame that is too large."""


class FrameCounter:
    """Follows one direction of a ZMTP connection and counts the frames that have begun and are not read yet."""

    def __init__(self, keyed: bool = False, max_bytes: int = wire.MAX_FRAME_BYTES) -> None:
        """`keyed`: only CURVE is let in. max_bytes: of a frame."""
        self._keyed, self._max_body = keyed, max_bytes + FRAME_COST
        self.max_bytes = max_bytes + SPARE_BYTES
        """What may have been sent that is not read."""
        self.unread = 0
        """Their bytes, with what each costs."""
        self._frames: deque[int] = deque()
        self._header = bytearray()
        self._greeted = False
        self._extra = 0
        self._body = 0

    @property
    def full(self) -> bool:
        """Whether the connection is at its limit."""
        return self.unread > self.max_bytes or len(self._frames) >= PEER_FRAMES

    @property
    def has_room(self) -> bool:
        """Whether a connection that was at its limit is far enough below it."""
        return self.unread <= self.max_bytes and len(self._frames) <= PEER_FRAMES // 2

    def feed(self, data: memoryview) -> int:
        """Follow the bytes up to the limit, and return their number. Raises BadFrame."""
        position = 0
        while position < len(data) and not self.full:
            if self._body:
                step = min(self._body, len(data) - position)
                self._body -= step
                position += step
                continue
            missing = (_missing_header if self._greeted else _missing_greeting)(self._header)
            self._header += data[position : position + missing]
            position += min(missing, len(data) - position)
            if self._greeted and not _missing_header(self._header):
                self._begin_frame()
            elif not self._greeted and not _missing_greeting(self._header):
                self._greeted = True
                has_key = self._header[12:32].rstrip(b"\0") == b"CURVE"
                if self._keyed and not has_key:
                    raise BadFrame("no key")
                self._extra = CURVE_BYTES if has_key else 0
                self._header.clear()
        return position

    def _begin_frame(self) -> None:
        self._body = int.from_bytes(self._header[1:], "big")
        self._header.clear()
        if self._body > self._max_body:
            raise BadFrame(f"a frame of {self._body} bytes")
        self._frames.append(self._body)
        self.unread += self._body + FRAME_COST

    def read(self, num_bytes: int) -> None:
        """Take away the frame of this content, which was read, and those before it, which libzmq kept for itself."""
        size = num_bytes + self._extra
        if size not in self._frames:
            return
        while (first := self._frames.popleft()) != size:
            self.unread -= first + FRAME_COST
        self.unread -= size + FRAME_COST


def _missing_greeting(header: bytearray) -> int:
    """Return how many bytes are missing to a greeting of ZMTP 3. Raises BadFrame as soon as it is none."""
    if (header[:1] or b"\xff") != b"\xff" or (len(header) > 9 and header[9] != 0x7F):
        raise BadFrame("no ZMTP greeting")
    if len(header) > 10 and header[10] < 3:
        raise BadFrame(f"ZMTP {header[10]}")
    return (11 if len(header) < 11 else GREETING_BYTES) - len(header)


def _missing_header(header: bytearray) -> int:
    """Return how many bytes are missing to a frame's header: flags, then a length of 1 or 8 bytes."""
    if not header:
        return 1
    if header[0] & 0xF8:
        raise BadFrame(f"flags {header[0]:#x}")
    return (9 if header[0] & 2 else 2) - len(header)
