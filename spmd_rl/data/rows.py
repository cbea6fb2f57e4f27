"""Makes rows of records, one problem each, in the shapes of TRL, verl, ROLL and others. See docs/DATA.md."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_rl.data.fields import (
    BrokenRow,
    checked,
    column_names,
    encodable,
    kind,
    opened,
    parse_messages,
    spelled,
    take_text,
    with_tools,
)
from spmd_rl.data.hub import source_records
from spmd_rl.data.judges import read_judge
from spmd_rl.data.pictures import Folder, take_pictures, with_own, with_pictures
from spmd_rl.types import ImagePart, Message

DEFAULT_DOMAIN = "math"
FINAL_ANSWER = re.compile(r"####\s*(\S.*?)\s*\Z", re.DOTALL)
"""Final answer of a solution in GSM8K: `#### n`"""
TAGGED = re.compile(r"<answer>\s*(\S.*?)\s*</answer>\s*\Z", re.DOTALL)
"""Final answer in GEOQA_R1V: `<answer> 145 </answer>`"""
PROBLEMS = ("messages", "prompt", "question", "problem")
TRUTHS = ("ground_truth", "answer", "solution")
MAX_PRIORITY = 1e9
SELF_JUDGED = ("instruction_id_list", "test", "test_cases")
"""Fields that judge a row without a ground truth (IFEval, HumanEval and KodCode, LiveCodeBench)"""
THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Record:
    """One problem in the form of its source."""

    where: str
    """`path:line`, or name and index of a generated problem"""
    problem: str | tuple[Message, ...]
    """A text for `data.format`, or messages"""
    ground_truth: str
    domain: str = DEFAULT_DOMAIN
    id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    lacks: Mapping[str, str] | None = None
    """Fields that `data.keys` maps to a missing column, each with the columns present; None for a generated problem"""
    priority: float = 0.0
    pictures: tuple[ImagePart, ...] = ()
    """Pictures in columns of their own, which the messages of `problem` have already"""


def read_rows(
    source: str | Path, key: str, columns: Mapping[str, str | None] | None = None, pictures: str | None = None
) -> Iterator[Record]:
    """Yield the rows of a file or a dataset of the hub. columns, pictures: `data.keys` and `data.pictures`."""
    records = (found[:2] for found in source_records(str(source), key))
    yield from parse_rows(records, key, columns or {}, Folder.of(str(source), pictures))


def parse_rows(
    records: Iterable[tuple[str, Any]], key: str, columns: Mapping[str, str | None], folder: Folder
) -> Iterator[Record]:
    """Yield the row of each (place, JSON value). columns: `data.keys`. folder: of pictures. UserError, naming the
    setting `key` and the record, for a broken one.
    """
    yield from checked(records, key, lambda record, where: _row(record, where, columns, folder))


def _row(data: Any, where: str, columns: Mapping[str, str | None], folder: Folder) -> Record:
    data, lacks = opened(data, columns)
    names = column_names(data)
    judged = columns.get("ground_truth", "") is not None
    tests = read_judge(data)
    with_tools((Message("user", ""),), data.get("tools"))
    pictures, problem, ground_truth = _each(
        lambda: take_pictures(data, columns, folder),
        lambda: _problem(data, [name for name in PROBLEMS if columns.get(name)] or PROBLEMS, names, folder),
        lambda: _ground_truth(data, columns, names, tests) if judged else "",
    )
    placed = with_pictures([Message("user", problem)] if isinstance(problem, str) else problem, pictures)
    problem = problem if isinstance(problem, str) else placed
    domain = _domain(data)
    own_id = data.pop("id", None)
    if own_id is not None and (isinstance(own_id, bool) or not isinstance(own_id, str | int) or own_id == ""):
        raise BrokenRow(f"`id` is {kind(own_id)}, not text or a whole number")
    if own_id is not None and isinstance(tag := data.get("tag"), str):
        # ROLL counts the rows of each source from 1, so ids are unique only with the tag.
        own_id = f"{tag}/{own_id}"
    own_id = None if own_id is None else encodable(str(own_id), "id")
    return Record(where, problem, ground_truth, domain, own_id, data, lacks, _priority(data), pictures)


def _priority(data: dict[str, Any]) -> float:
    value = data.pop("priority", 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BrokenRow(f"`priority` is {kind(value)}, not a number")
    if not abs(value) <= MAX_PRIORITY:
        raise BrokenRow(f"`priority` is {value}, not within {MAX_PRIORITY:g} of 0")
    return float(value)


def _each(*fields: Callable[[], Any]) -> list[Any]:
    """Return the functions' results, or raise all their BrokenRow messages at once."""
    found, broken = [], []
    for field_of in fields:
        try:
            found.append(field_of())
        except BrokenRow as error:
            broken.append(str(error))
    if broken:
        raise BrokenRow("; and it ".join(broken))
    return found


def _domain(data: dict[str, Any]) -> str:
    """Return `domain`, else ROLL's `tag` or verl's `ability`, else the domain of the judging field."""
    if "domain" in data:
        return take_text(data, "domain")
    if data.get("tag") is not None:
        return take_text(dict(data), "tag")
    if "reward_model" in data and data.get("ability") is not None:
        return take_text(dict(data), "ability").lower()
    if data.get("instruction_id_list"):
        return "ifeval"
    return "code" if data.get("test") or data.get("test_cases") else DEFAULT_DOMAIN


def _problem(data: dict[str, Any], names: Sequence[str], there: str, folder: Folder) -> str | tuple[Message, ...]:
    """Remove and return the first present one of `names`; not a whole conversation, if there is another."""
    found = [name for name in names if name in data]
    if not found:
        raise BrokenRow(
            f"needs `question`, `prompt` or `messages`; it has {there}: "
            "name the question with data.keys.question=COLUMN"
        )
    if len(found) > 1 and found[0] == "messages" and _ends_with_answer(data["messages"]):
        found = found[1:]
    name = found[0]
    if name == "messages" or (name == "prompt" and isinstance(data[name], list)):
        return with_own(_messages(data.pop(name), name), folder)
    # HumanEval's prompt stays in the row: it is the head of the function that its tests call.
    return take_text(dict(data) if "entry_point" in data else data, name)


def _ends_with_answer(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    messages = parse_messages(value, name)
    if messages[-1].role == "assistant":
        raise BrokenRow(f"`{name}` end with a message of the assistant, so the prompt would contain the answer")
    if not any(message.plain_text.strip() for message in messages):
        raise BrokenRow(f"`{name}` are empty")
    return messages


def _ground_truth(data: dict[str, Any], columns: Mapping[str, str | None], there: str, tests: str) -> str:
    """Return the first present one of `TRUTHS`, except the column of `tests`: the part of an `answer` after its last
    `####`, the content of the last `\\boxed{}` of a `solution`.
    """
    names = [name for name in TRUTHS if columns.get(name)] or TRUTHS
    judged = any(data.get(key) for key in SELF_JUDGED)
    passed_over = {tests, "solution"} if judged else set()
    name = next((name for name in names if name in data and name not in passed_over), None)
    if name is None:
        if judged:
            return ""
        raise BrokenRow(
            f"needs `ground_truth` or `answer`; it has {there}: set data.keys.answer=COLUMN, "
            "or data.keys.ground_truth=null if the reward needs none"
        )
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value in (math.inf, -math.inf):
        raise BrokenRow(f"`{name}` is {kind(value)}, not text or a number")
    # NaN is the only value that differs from itself.
    if value != value:
        raise BrokenRow(f"`{name}` is {kind(value)}: leave the row out")
    text = encodable(value if isinstance(value, str) else spelled(value), name)
    if name == "solution" and _solved(text) is None and (empty := [key for key in SELF_JUDGED if key in data]):
        raise BrokenRow(f"`{empty[0]}` is empty, and a `solution` without \\boxed{{}} has no answer to compare with")
    final = _final_answer(text) if name == "answer" else _solved(text) if name == "solution" else None
    if final is None:
        del data[name]
        return text
    return final.replace(",", "") if THOUSANDS.fullmatch(final) else final


def _final_answer(text: str) -> str | None:
    found = FINAL_ANSWER.search(text.rpartition("\n")[2])
    return found and found.group(1)


def _solved(text: str) -> str | None:
    boxed, tagged = _boxed(text), TAGGED.search(text)
    return tagged[1] if boxed is None and tagged else boxed


def _boxed(text: str) -> str | None:
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place]
    return None
