"""Makes rows of records, one problem each, in the shapes that TRL, verl, ROLL and others use. See docs/DATA.md."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.errors import UserError
from spmd_rl.types import Message

ABSENT = object()
DEFAULT_DOMAIN = "math"
FINAL_ANSWER = re.compile(r"####\s*(\S.*?)\s*\Z", re.DOTALL)
"""The final answer of a solution in GSM8K, which ends with `#### n`"""
PROBLEMS = ("messages", "prompt", "question", "problem")
TRUTHS = ("ground_truth", "answer", "solution")
SELF_JUDGED = ("instruction_id_list", "test", "test_cases")
"""Fields by which a row is judged without a ground truth (IFEval, HumanEval and KodCode, LiveCodeBench)"""
MAX_DEPTH = 100
"""The most levels of lists and objects in a row"""
THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Record:
    """One problem, as its source gives it."""

    where: str
    """`path:line`, or the name and index of a generated problem, for error messages"""
    problem: str | tuple[Message, ...]
    """A text to which `data.format` is applied, or messages that are used as they are"""
    ground_truth: str
    domain: str = DEFAULT_DOMAIN
    id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    lacks: Mapping[str, str] | None = None
    """Fields that `data.keys` maps to a column that the record does not have, each with the columns that it has; None
    for a generated problem"""


def parse_rows(records: Iterable[tuple[str, Any]], key: str, columns: Mapping[str, str | None]) -> Iterator[Record]:
    """Yield the row of each record: where it stands, and what JSON makes of it. `columns` is `data.keys`.

    UserError, naming the setting `key` and the record, for a broken one.
    """
    for where, record in records:
        try:
            yield _row(record, where, columns)
        except _BrokenRow as error:
            raise UserError(f"{key}: {where}: {error}") from None


class _BrokenRow(Exception):
    """Says what is wrong with a row."""


def _row(data: Any, where: str, columns: Mapping[str, str | None]) -> Record:
    """Check one record."""
    if not isinstance(data, dict):
        raise _BrokenRow(f"not an object but {_kind(data)}")
    if _depth(data) > MAX_DEPTH:
        raise _BrokenRow(f"nested more than {MAX_DEPTH} levels deep")
    data, lacks = _renamed(data, columns)
    names = _names(data)
    judged = columns.get("ground_truth", "") is not None
    problem, ground_truth = _each(
        lambda: _problem(data, [name for name in PROBLEMS if columns.get(name)] or PROBLEMS, names),
        lambda: _ground_truth(data, columns, names) if judged else "",
    )
    domain = _domain(data)
    own_id = data.pop("id", None)
    if own_id is not None and (isinstance(own_id, bool) or not isinstance(own_id, str | int) or own_id == ""):
        raise _BrokenRow(f"`id` is {_kind(own_id)}, not text or a whole number")
    if own_id is not None and isinstance(tag := data.get("tag"), str):
        own_id = f"{tag}/{own_id}"  # ROLL counts each source's rows from 1
    own_id = None if own_id is None else _encodable(str(own_id), "id")
    return Record(where, problem, ground_truth, domain, own_id, data, lacks)


def _each(*fields: Callable[[], Any]) -> list[Any]:
    """Return what these give, or say of all of them at once what is wrong."""
    found, broken = [], []
    for field_of in fields:
        try:
            found.append(field_of())
        except _BrokenRow as error:
            broken.append(str(error))
    if broken:
        raise _BrokenRow("; and it ".join(broken))
    return found


def _names(data: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in data) or "nothing"


def _depth(data: Any) -> int:
    """Return how many levels of lists and objects there are, up to one more than `MAX_DEPTH`."""
    level, depth = [data], 0
    while level and depth <= MAX_DEPTH:
        level = [one for found in level for one in (found.values() if isinstance(found, dict) else found)]
        level = [one for one in level if isinstance(one, dict | list)]
        depth += 1
    return depth


def _renamed(data: dict[str, Any], columns: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the record with its columns under the names that `data.keys` gives them, and `Record.lacks`."""
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
            lacks[name] = _names(data)
    if missing:
        raise _BrokenRow(f"has no {' and no '.join(missing)}; it has {_names(data)}")
    return out, lacks


def _column(data: Any, column: str) -> Any:
    """Return the value of a column, or of a field inside of one: `reward_model.ground_truth`."""
    if isinstance(data, dict) and column in data:
        return data[column]
    head, dot, rest = column.partition(".")
    return _column(data[head], rest) if dot and isinstance(data, dict) and head in data else ABSENT


def _domain(data: dict[str, Any]) -> str:
    """Return `domain`, else ROLL's `tag` or verl's `ability`, else the domain of the field that judges the row."""
    if "domain" in data:
        return _text(data, "domain")
    if data.get("tag") is not None:
        return _text(dict(data), "tag")
    if "reward_model" in data and data.get("ability") is not None:
        return _text(dict(data), "ability").lower()
    if "instruction_id_list" in data:
        return "ifeval"
    return "code" if data.get("test") or data.get("test_cases") else DEFAULT_DOMAIN


def _problem(data: dict[str, Any], names: Sequence[str], there: str) -> str | tuple[Message, ...]:
    """Take the first of `names` that the row has out of it; not a whole conversation, if there is another."""
    found = [name for name in names if name in data]
    if not found:
        raise _BrokenRow(
            f"needs `question`, `prompt` or `messages`; it has {there}: "
            "say which is the question with data.keys.question=COLUMN"
        )
    if len(found) > 1 and found[0] == "messages" and _ends_with_answer(data["messages"]):
        found = found[1:]
    name = found[0]
    if name == "messages" or (name == "prompt" and isinstance(data[name], list)):
        return _messages(data.pop(name), name)
    # HumanEval's prompt stays in the row: it is the head of the function that its tests call.
    return _text(dict(data) if "entry_point" in data else data, name)


def _ends_with_answer(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    """Parse a list of {role, content}, which may be a JSON string (as in ROLL's rows)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _BrokenRow(f"`{name}` is not JSON: {error}") from None
    if not isinstance(value, list) or not value:
        raise _BrokenRow(f"`{name}` is not a list of messages")
    messages = []
    for index, item in enumerate(value):
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise _BrokenRow(f"`{name}[{index}]` needs a `role` and a `content`, both text")
        messages.append(Message(_encodable(role, name), _encodable(content, name)))
    if messages[-1].role == "assistant":
        raise _BrokenRow(f"`{name}` end with the assistant's own: the answer would stand in the prompt")
    if not any(message.content.strip() for message in messages):
        raise _BrokenRow(f"`{name}` are empty")
    return tuple(messages)


def _ground_truth(data: dict[str, Any], columns: Mapping[str, str | None], there: str) -> str:
    """Return the first of `TRUTHS` that the row has; of an `answer` what follows its last `####`, of a `solution` what
    its last `\\boxed{}` holds."""
    nested = data.get("reward_model")
    if "ground_truth" not in data and isinstance(nested, dict) and nested.get("ground_truth") is not None:
        data["ground_truth"] = nested["ground_truth"]
    names = [name for name in TRUTHS if columns.get(name)] or TRUTHS
    judged = any(data.get(key) for key in SELF_JUDGED)
    name = next((name for name in names if name in data and not (name == "solution" and judged)), None)
    if name is None:
        if judged:
            return ""
        raise _BrokenRow(
            f"needs `ground_truth` or `answer`; it has {there}: say data.keys.answer=COLUMN, "
            "or data.keys.ground_truth=null if the reward needs none"
        )
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _BrokenRow(f"`{name}` is {_kind(value)}, not text or a number")
    text = _encodable(str(value), name)
    final = _final_answer(text) if name == "answer" else _boxed(text) if name == "solution" else None
    if final is None:
        del data[name]
        return text
    return final.replace(",", "") if THOUSANDS.fullmatch(final) else final


def _final_answer(text: str) -> str | None:
    """What follows `####` on the last line."""
    found = FINAL_ANSWER.search(text.rpartition("\n")[2])
    return found and found.group(1)


def _boxed(text: str) -> str | None:
    """What the last `\\boxed{}` of a text holds, if its braces match."""
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place]
    return None


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


def plain(value: Any) -> Any:
    """Convert a value to plain JSON values: numpy's scalars and arrays, tuples and sets become numbers and lists.

    Integers beyond 64 bits, which msgpack cannot encode, become text, and so does anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(part) for part in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
