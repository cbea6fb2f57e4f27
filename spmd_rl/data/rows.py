"""Reads and checks JSONL rows, one problem a line. docs/DATA.md says what a row may hold."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.errors import UserError
from spmd_rl.types import Message

DEFAULT_DOMAIN = "math"
FINAL_ANSWER = re.compile(r"####\s*(\S.*?)\s*\Z", re.DOTALL)
"""The final answer of a solution in GSM8K, which ends with `#### n`"""
SELF_JUDGED = ("instruction_id_list", "test", "test_cases")
"""Fields by which a row is judged without a ground truth (IFEval, HumanEval and KodCode, LiveCodeBench)"""
THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One problem, as its source gives it."""

    where: str
    """`path:line`, or the name and index of a generated problem, for error messages"""
    problem: str | tuple[Message, ...]
    """A text to which `data.format` is applied, or messages that are used as they are"""
    ground_truth: str
    domain: str = DEFAULT_DOMAIN
    id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def read_rows(path: Path, key: str) -> Iterator[Row]:
    """Yield the rows of a JSONL file (UTF-8), without blank lines. `key` is the setting that a `UserError` names."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{key}: cannot read {path}: {error.strerror}") from None
    empty = True
    with file:
        for number, line in enumerate(file, 1):  # as bytes: a line ends at \n alone
            if not line.strip():
                continue
            empty = False
            where = f"{path}:{number}"
            try:
                yield parse_row(line, where)
            except _BrokenRow as error:
                raise UserError(f"{key}: {where}: {error}") from None
    if empty:
        raise UserError(f"{key}: {path} has no rows")


class _BrokenRow(Exception):
    """Says what is wrong with a row."""


def parse_row(line: bytes, where: str) -> Row:
    """Parse and check one line."""
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _BrokenRow("not UTF-8") from None
    except ValueError as error:
        raise _BrokenRow(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise _BrokenRow(f"not an object but {_kind(data)}")
    problem = _problem(data)
    ground_truth = _ground_truth(data)
    domain = _domain(data)
    own_id = data.pop("id", None)
    if own_id is not None and (isinstance(own_id, bool) or not isinstance(own_id, str | int) or own_id == ""):
        raise _BrokenRow(f"`id` is {_kind(own_id)}, not text or a whole number")
    if own_id is not None and isinstance(tag := data.get("tag"), str):
        own_id = f"{tag}/{own_id}"  # ROLL counts each source's rows from 1
    return Row(where, problem, ground_truth, domain, None if own_id is None else _encodable(str(own_id), "id"), data)


def _domain(data: dict[str, Any]) -> str:
    """Return `domain`, else ROLL's `tag` (which stays in the row), else the domain of the field that judges the row."""
    if "domain" in data:
        return _text(data, "domain")
    if data.get("tag") is not None:
        return _text(dict(data), "tag")
    if "instruction_id_list" in data:
        return "ifeval"
    return "code" if data.get("test") or data.get("test_cases") else DEFAULT_DOMAIN


def _problem(data: dict[str, Any]) -> str | tuple[Message, ...]:
    """Take the first of `messages`, `prompt` and `question` out of the row."""
    if "messages" in data:
        return _messages(data.pop("messages"))
    for name in ("prompt", "question"):
        if name in data:
            # HumanEval's prompt stays in the row: it is the head of the function that its tests call.
            return _text(dict(data) if "entry_point" in data else data, name)
    raise _BrokenRow("needs `question`, `prompt` or `messages`")


def _messages(value: Any) -> tuple[Message, ...]:
    """Parse a list of {role, content}, which may be a JSON string (as in ROLL's rows)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _BrokenRow(f"`messages` is not JSON: {error}") from None
    if not isinstance(value, list) or not value:
        raise _BrokenRow("`messages` is not a list of messages")
    messages = []
    for index, item in enumerate(value):
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise _BrokenRow(f"`messages[{index}]` needs a `role` and a `content`, both text")
        messages.append(Message(_encodable(role, "messages"), _encodable(content, "messages")))
    if messages[-1].role == "assistant":
        raise _BrokenRow("`messages` end with the assistant's own: the answer would stand in the prompt")
    if not any(message.content.strip() for message in messages):
        raise _BrokenRow("`messages` are empty")
    return tuple(messages)


def _ground_truth(data: dict[str, Any]) -> str:
    """Return `ground_truth`, else what follows the last `####` of `answer`, else all of `answer`."""
    name = "ground_truth" if "ground_truth" in data else "answer"
    if name not in data:
        if any(data.get(key) for key in SELF_JUDGED):
            return ""
        raise _BrokenRow("needs `ground_truth` or `answer`")
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _BrokenRow(f"`{name}` is {_kind(value)}, not text or a number")
    text = _encodable(str(value), name)
    final = FINAL_ANSWER.search(text.rpartition("\n")[2]) if name == "answer" else None
    if final is None:
        del data[name]
        return text
    number = final.group(1)
    return number.replace(",", "") if THOUSANDS.fullmatch(number) else number


def _text(data: dict[str, Any], name: str) -> str:
    """Take a text that is not blank out of the row."""
    value = data.pop(name)
    if not isinstance(value, str):
        raise _BrokenRow(f"`{name}` is {_kind(value)}, not text")
    if not value.strip():
        raise _BrokenRow(f"`{name}` is empty")
    return _encodable(value, name)


def _encodable(text: str, name: str) -> str:
    """Refuse a lone surrogate, which JSON allows and no tokenizer or file accepts; return the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BrokenRow(f"`{name}` holds half a character (a lone surrogate)") from None
    return text


def _kind(value: Any) -> str:
    """Return the JSON name of a value's type."""
    names = {bool: "a boolean", dict: "an object", list: "a list", str: "text", type(None): "null"}
    return names.get(type(value), "a number")
