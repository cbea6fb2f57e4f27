"""Parsing shared by all pipelines: JSON objects, columns by our names, texts and messages.

A broken record raises `BrokenRow`; `checked` adds its file and line.
"""

import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from spmd_rl.base.errors import UserError
from spmd_rl.types import ImagePart, Message, TextPart

ABSENT = object()
SAID = ("reasoning_content", "tool_calls")
"""Fields that may replace a message's content"""
MAX_DEPTH = 100

SIGNATURES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")
"""First bytes of pictures: PNG, JPEG, GIF, WebP and BMP"""

T = TypeVar("T")


class BrokenRow(Exception):
    """The reason why a row is invalid."""


def checked(records: Iterable[tuple[str, Any]], key: str, parse: Callable[[Any, str], T]) -> Iterator[T]:
    """Yield `parse(record, where)` of each pair of a place and a JSON value. UserError, naming the setting `key` and
    the record, for a broken one.
    """
    for where, record in records:
        try:
            yield parse(record, where)
        except BrokenRow as error:
            raise UserError(f"{key}: {where}: {error}") from None


def opened(data: Any, columns: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
    """Check that a record is an object of limited depth, and rename its columns."""
    if not isinstance(data, dict):
        raise BrokenRow(f"not an object but {kind(data)}")
    if _depth(data) > MAX_DEPTH:
        raise BrokenRow(f"nested more than {MAX_DEPTH} levels deep")
    return _renamed(data, columns)


def column_names(data: Mapping[str, Any]) -> str:
    """Return a record's columns, for messages."""
    return ", ".join(f"`{name}`" for name in data) or "nothing"


def _depth(data: Any) -> int:
    # Level by level instead of recursion, which hostile rows could exhaust.
    level, depth = [data], 0
    while level and depth <= MAX_DEPTH:
        level = [one for found in level for one in (found.values() if isinstance(found, dict) else found)]
        level = [one for one in level if isinstance(one, dict | list)]
        depth += 1
    return depth


def _renamed(data: dict[str, Any], columns: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
    out, lacks, missing = dict(data), {}, []
    for name, column in columns.items():
        found = data if column is None else _column(data, column)
        if column is None:
            out.pop(name, None)
        elif found is not ABSENT:
            out.pop(column, None)
            out[name] = found
        elif name not in data:
            missing.append(f"`{column}` (data.keys.{name})")
        else:
            lacks[name] = column_names(data)
    if missing:
        raise BrokenRow(f"has no {' and no '.join(missing)}; it has {column_names(data)}")
    return out, lacks


def _column(data: Any, column: str) -> Any:
    # A column's own name may have dots; else they lead to a field inside one: `reward_model.ground_truth`.
    if isinstance(data, dict) and column in data:
        return data[column]
    head, dot, rest = column.partition(".")
    return _column(data[head], rest) if dot and isinstance(data, dict) and head in data else ABSENT


def parse_messages(value: Any, name: str) -> tuple[Message, ...]:
    """Parse a list of {role, content}, perhaps as JSON text (as in ROLL's rows)."""
    value = from_json(value, name) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        raise BrokenRow(f"`{name}` is not a list of messages")
    return tuple(_message(item, f"{name}[{index}]") for index, item in enumerate(value))


def _message(item: Any, name: str) -> Message:
    # Tables fill absent fields of messages with null.
    fields = {key: value for key, value in item.items() if value is not None} if isinstance(item, dict) else {}
    role, weight = fields.pop("role", None), fields.pop("weight", 1)
    content = fields.pop("content", "" if any(map(fields.get, SAID)) else None)
    if isinstance(content, list):
        content = _content(content, name)
    if not isinstance(role, str) or not isinstance(content, str | tuple):
        raise BrokenRow(f"`{name}` needs a `role` and a `content`, a text or a list of parts")
    if weight not in (0, 1):
        raise BrokenRow(
            f"`{name}` has a `weight` of {weight!r}: known are 1, and 0 for an answer that is not trained on"
        )
    content = encodable(content, name) if isinstance(content, str) else content
    message = Message(encodable(role, name), content, is_learnt=bool(weight)).with_fields(fields)
    encodable(message.fields, name)
    return message


def _content(parts: list[Any], name: str) -> str | tuple[TextPart | ImagePart, ...]:
    """Return content parts, or a text if no part is a picture. A picture's `path` is the row's path, URL or base64
    text; empty if a column has it.
    """
    found = tuple(_part(part, f"`{name}` needs parts of the types text, image and image_url;") for part in parts)
    if any(isinstance(part, ImagePart) for part in found):
        return found
    return "".join(part.text for part in found)


def _part(part: Any, needs: str) -> TextPart | ImagePart:
    # Tables fill absent fields with null.
    fields = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    type = fields.pop("type", "text" if isinstance(part, str) else None)
    if type == "text":
        text = part if isinstance(part, str) else fields.get("text")
        if not isinstance(text, str):
            raise BrokenRow(f"{needs} one has no `text`")
        return TextPart(encodable(text, "text"))
    if type in PICTURE_PARTS:
        return ImagePart("", path=picture_reference(fields, type) if any(map(fields.get, PICTURE_FIELDS)) else "")
    raise BrokenRow(f"{needs} one is of {type!r}" if type else f"{needs} one has no `type`")


PICTURE_PARTS = ("image", "image_url", "input_image")
PICTURE_FIELDS = ("image", "image_url", "url", "bytes", "base64", "path")
"""Fields that may hold a picture: OpenAI's, transformers', qwen-vl-utils' and those of tables"""


def picture_reference(value: Any, name: str) -> str:
    """Return a row's picture as one text: a path, a URL or base64 text."""
    for _ in range(MAX_DEPTH):
        if not isinstance(value, dict):
            break
        value = next((value[field] for field in PICTURE_FIELDS if value.get(field)), None)
    if not isinstance(value, str) or not value:
        raise BrokenRow(f"`{name}` is {kind(value)}, not a picture: a path, `data:` URL, base64 text or bytes")
    return encodable(value, name)


def with_tools(messages: tuple[Message, ...], tools: Any) -> tuple[Message, ...]:
    """Put `tools` into the first message: a list of objects, its JSON text, or nothing."""
    tools = from_json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BrokenRow("`tools` is not a list of objects, which chat templates need; data.keys.tools=null ignores it")
    first, *rest = messages
    return (first.with_fields({**first.others, "tools": tools}), *rest) if tools else messages


def from_json(text: str, name: str) -> Any:
    """Return the value of a JSON text."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise BrokenRow(f"`{name}` is not JSON: {error}") from None


def take_text(data: dict[str, Any], name: str) -> str:
    """Remove and return a text, which must not be blank."""
    value = data.pop(name)
    if not isinstance(value, str):
        raise BrokenRow(f"`{name}` is {kind(value)}, not text")
    if not value.strip():
        raise BrokenRow(f"`{name}` is empty")
    return encodable(value, name)


def encodable(value: str, name: str) -> str:
    """Return the text. BrokenRow for a lone surrogate, which JSON allows and no tokenizer accepts."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BrokenRow(f"`{name}` holds half a character (a lone surrogate)") from None
    return value


def kind(value: Any) -> str:
    """Return the JSON name of a value's type, or of a float that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN, as a missing number is written" if math.isnan(value) else "infinite"
    known = {bool: "a boolean", dict: "an object", list: "a list", str: "text", type(None): "null"}
    return known.get(type(value), "a number")


def spelled(value: float | Decimal) -> str:
    """Return the decimal spelling of a finite number, the same for equal ones: `0.00001`, `4`."""
    # Through Decimal: `str(0.00001)` is `1e-05`, which equals no other spelling of the number.
    text = str(value) if isinstance(value, int) else f"{Decimal(str(value)):f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def plain(value: Any) -> Any:
    """Convert a value to plain JSON: numpy's scalars and arrays, tuples and sets become numbers and lists.

    Integers beyond 64 bits, bytes and other types become text; bytes of a picture become a `data:` URL.
    UnicodeDecodeError for other bytes that are not UTF-8.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        # msgpack cannot encode more than 64 bits.
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes | bytearray):
        # A text may begin like a picture, but no picture is UTF-8.
        try:
            return value.decode()
        except UnicodeDecodeError:
            if value.startswith(SIGNATURES):
                return f"data:;base64,{b64encode(value).decode()}"
            raise
    if isinstance(value, Decimal):
        return spelled(value) if value.is_finite() else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(part) for part in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
