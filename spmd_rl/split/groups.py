"""Groups of samples as bytes: msgpack of the structs in `types`, whose arrays travel as raw bytes."""

from array import array
from typing import Any

import msgspec

from spmd_rl.rollout import RankReport
from spmd_rl.rollout.replay_log import PartialRollouts
from spmd_rl.rollout.rounds import GroupSlice
from spmd_rl.types import Group


class StepPart(msgspec.Struct, array_like=True):
    """What one generating rank made of a step."""

    report: RankReport
    finished: list[tuple[GroupSlice, Group]]
    """Its slices that the step may use, in order."""
    waited: float
    """Seconds in which it waited for a newer policy before it began the step."""
    swaps: list[float] = []
    """Seconds of each change of the policy in the middle of the step."""


def _encode_array(value: Any) -> bytes:
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is array:
        return array(chr(value[0]), value[1:])
    raise NotImplementedError(f"{kind.__name__} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_steps = msgspec.msgpack.Decoder(StepPart, dec_hook=_decode_array)
_groups = msgspec.msgpack.Decoder(list[Group], dec_hook=_decode_array)
_partial = msgspec.msgpack.Decoder(PartialRollouts, dec_hook=_decode_array)


def pack(value: StepPart | list[Group] | PartialRollouts) -> bytes:
    """Encode for `unpack_step`, `unpack_groups` or `unpack_partial`."""
    return _encoder.encode(value)


def unpack_step(payload: bytes | memoryview) -> StepPart:
    """Return what `pack` was given. msgspec.MsgspecError for any other bytes."""
    return _steps.decode(payload)


def unpack_groups(payload: bytes | memoryview) -> list[Group]:
    """Return what `pack` was given. msgspec.MsgspecError for any other bytes."""
    return _groups.decode(payload)


def unpack_partial(payload: bytes | memoryview) -> PartialRollouts:
    """Return what `pack` was given. msgspec.MsgspecError for any other bytes."""
    return _partial.decode(payload)
