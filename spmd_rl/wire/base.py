"""Frames: their limits, their encoding, and the base of all messages."""

from functools import reduce
from operator import or_
from typing import Annotated, Any

import msgspec

VERSION = 2
MAX_FRAME_BYTES = 10 << 20
"""The largest frame that is sent or accepted."""
MAX_INPUT_BYTES = 8 << 20
"""The largest `ScoreInput`; the client gives a larger one the verdict `rejected`."""
BATCH_BYTES = 1 << 20
"""A sender closes a frame of several items once it holds this many bytes."""
BATCH_ITEMS = 256
"""A sender closes a frame of several items once it holds this many."""
WINDOW = 2048
"""The number of requests that a client may have in flight at its host; the others wait in the client."""
WINDOW_BYTES = 64 << 20
"""The number of bytes that a client may have in flight at its host."""

MAX_ITEMS = 8 * WINDOW
"""The most entries of a list in a message."""

MAX_ACTION_BYTES = 1 << 20
"""The largest action that is sent to an environment."""
MAX_ENV_REPLY_BYTES = 2 << 20
"""The largest observation and `info` together that an environment may return."""

MAX_TIMEOUT = 86_400.0
"""The longest timeout in seconds."""


class WireError(ValueError):
    """Raised for bytes that are no frame of this version and schema, and for a message that cannot be encoded."""


class WireMessage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """A message, or a part of one: an array on the wire, and fields that the schema does not have are refused."""


Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)]
Few = msgspec.Meta(max_length=1_000)
Many = msgspec.Meta(max_length=MAX_ITEMS)


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as a frame. WireError if a value has no msgpack form or the frame would be too large."""
    frame = bytes((VERSION,)) + pack(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return frame


def pack(value: Any) -> msgspec.Raw:
    """Encode a part of a later frame. WireError if it has no msgpack form (an object, a lone surrogate...)."""
    try:
        return msgspec.Raw(_encoder.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot be sent: {error}") from None


class Codec:
    """Decodes the frames that one kind of receiver accepts."""

    def __init__(self, *messages: type) -> None:
        self._decoder = msgspec.msgpack.Decoder(reduce(or_, messages))

    def decode(self, frame: bytes) -> Any:
        """Decode the message in a frame. Anything else raises WireError and never another exception."""
        if not frame or frame[0] != VERSION:
            raise WireError(f"frame version {frame[0] if frame else 'missing'}, ours is {VERSION}")
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        return self.unpack(memoryview(frame)[1:])

    def unpack(self, body: Any) -> Any:
        """Decode a part that `pack` encoded. WireError as in `decode`."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise WireError(f"not understood: {error}") from None
