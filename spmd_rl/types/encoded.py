"""The data vocabulary as msgpack bytes; an array is its typecode followed by its raw bytes."""

from array import array
from functools import cache
from typing import Any

import msgspec


def _encode_array(value: Any) -> bytes:
    if isinstance(value, array):
        # Raw bytes instead of a list: a message of ids takes no conversion for each number.
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is array:
        return array(chr(value[0]), value[1:])
    raise NotImplementedError(f"{kind.__name__} cannot be encoded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)


def pack(value: Any) -> bytes:
    """Encode structs, or sequences of them."""
    return _encoder.encode(value)


def unpack(payload: bytes | memoryview, kind: Any) -> Any:
    """Decode the output of `pack`. MsgspecError, ValueError, TypeError or LookupError for other bytes."""
    # msgspec reports its own mistakes as MsgspecError, but `_decode_array` indexes and builds arrays: bad typecodes and
    # empty payloads raise built-in errors.
    return _decoder(kind).decode(payload)
