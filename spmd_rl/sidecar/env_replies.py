"""Check of environments' replies: Gymnasium's five-tuple over strings, in plain types, of bounded size."""

import math
from typing import Any

from spmd_rl.base.pictures import check_size, plain_picture
from spmd_rl.base.png import encode_png
from spmd_rl.sidecar import wire
from spmd_rl.types import EnvReply

EXHAUSTED = EnvReply("", info={"exhausted": True})
"""Reply to a reset without an observation: a finite set of tasks is exhausted."""
MAX_DEPTH = 32
_SIZES = {2: "(observation, info)", 5: "(observation, reward, terminated, truncated, info)"}


def checked_reset(returned: Any) -> EnvReply:
    """Convert the result of `reset`. ValueError if malformed."""
    observation, info = _parts(returned, 2)
    if observation is None:
        return EXHAUSTED
    info, pictures = _info(info)
    return EnvReply(_text(observation), info=info, pictures=pictures)


def checked_step(returned: Any) -> EnvReply:
    """Convert the result of `step`. ValueError if malformed."""
    observation, reward, terminated, truncated, info = _parts(returned, 5)
    flags = [_flag(name, value) for name, value in (("terminated", terminated), ("truncated", truncated))]
    return EnvReply(_text(observation), _number("reward", reward), *flags, *_info(info))


def packed(reply: EnvReply) -> Any:
    """Encode a checked reply. ValueError if too large or without an encoding (a lone surrogate)."""
    raw = wire.pack(reply)
    if (size := len(memoryview(raw))) > wire.MAX_ENV_REPLY_BYTES:
        raise ValueError(f"observation, pictures and info have {size} bytes; at most {wire.MAX_ENV_REPLY_BYTES}")
    return raw


def _parts(returned: Any, size: int) -> tuple:
    if not isinstance(returned, tuple | list) or len(returned) != size:
        what = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        raise ValueError(f"must return {_SIZES[size]}, not {what}")
    return tuple(returned)


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise ValueError(f"observation must be a string, not {type(observation).__name__}")
    return str(observation)


def _number(name: str, value: Any) -> float:
    value = _unboxed(value)
    if not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, not {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    value = _unboxed(value)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {type(value).__name__}")
    return value


def _info(info: Any) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    if not isinstance(info, dict):
        raise ValueError(f"info must be a dict, not {type(info).__name__}")
    pictures = info.get("pictures") or ()
    if not isinstance(pictures, list | tuple):
        raise ValueError(f"info.pictures must be a list, not {type(pictures).__name__}")
    rest = {name: value for name, value in info.items() if name != "pictures"}
    shown = tuple(_picture(f"info.pictures[{number}]", one) for number, one in enumerate(pictures))
    return _plain("info", rest, MAX_DEPTH), shown


def _picture(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes):
        shape, kind = getattr(value, "shape", ()), str(getattr(value, "dtype", type(value).__name__))
        if len(shape) != 3 or shape[2] != 3 or not all(shape) or kind != "uint8":
            raise ValueError(f"{name} must be bytes or uint8 [height, width, 3], not {kind} {[*shape]}")
        check_size(shape[1], shape[0], name)
        return encode_png([value.tobytes()], shape[1], shape[0])
    return plain_picture(value, name).data


def _plain(name: str, value: Any, depth: int) -> Any:
    if not depth:
        raise ValueError(f"{name} is nested more than {MAX_DEPTH} deep")
    value = _unboxed(value)
    if value is None or isinstance(value, bool | str):
        return value if type(value) in (bool, str, type(None)) else str(value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"{name} is an integer of more than 64 bits")
        return int(value)
    if isinstance(value, float):
        return _number(name, value)
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{name} has the key {odd[0]!r}, which is not a string")
        return {str(key): _plain(f"{name}.{key}", item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{i}]", item, depth - 1) for i, item in enumerate(value)]
    raise ValueError(f"{name} must be plain JSON, not {type(value).__name__}")


def _unboxed(value: Any) -> Any:
    if isinstance(value, bool | str | dict | list | tuple) or not hasattr(value, "item"):
        return value
    return value.item() if getattr(value, "ndim", 0) == 0 else value
