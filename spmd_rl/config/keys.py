"""The dotted keys of a schema: leaves, types, and the key nearest to a misspelt one.

Inline entries of a section (`reward.math.*`, sibling of `reward.error_budget`) are in a field with `metadata={"inline":
True}`, of type `dict[str, <section>]`. A field with `metadata={"partial": <section>}` maps some keys of that section
(`critic.train`); it is one setting while nothing is given.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from spmd_rl.base.errors import UserError
from spmd_rl.config.known_names import EARLIER, hint

TYPING_ERROR = 0.9
"""Similarity above which a key is mistyped, not another library's"""
UNLIKE = 0.5
"""Similarity below which no key is suggested"""

PLACEHOLDERS = {"reward": {"<domain>": {}}, "env": {"<tag>": {}}, "teacher": {"<domain>": {}}}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting, such as `rollout.temperature`."""

    key: str
    type: Any
    section: type
    field: Field


def inline_field(section: type) -> Field | None:
    """Return the field of a section's inline entries, if any."""
    return next((field for field in fields(section) if "inline" in field.metadata), None)


def partial_of(section: type, name: str) -> type | None:
    """Return the section of which the mapping `name` holds some keys, if any."""
    field = next((field for field in fields(section) if field.name == name), None)
    return field.metadata.get("partial") if field else None


def key_types(section: type, given: Iterable[str] = ()) -> dict[str, Any]:
    """Return names and types of a section's keys, and of its inline entries among `given`.

    A dataclass as type is a subsection.
    """
    hints, holder = get_type_hints(section), inline_field(section)
    known = {field.name: hints[field.name] for field in fields(section) if field is not holder}
    entries = [name for name in given if name not in known] if holder else []
    return known | {name: get_args(hints[holder.name])[1] for name in entries}


def leaves(section: type, given: Mapping[str, Any] = PLACEHOLDERS, prefix: str = "") -> Iterator[Leaf]:
    """Yield all settings below `section` in order, with the inline entries of the tree `given`, by default
    placeholders (`reward.<domain>.target`)."""
    by_name = {field.name: field for field in fields(section)}
    for name, kind in key_types(section, given).items():
        whole = partial_of(section, name)
        # A leaf of the tree is not looked up: it may be an interpolation that fails.
        found = given.get(name) if whole or is_dataclass(kind) else None
        below = found if isinstance(found, Mapping) else {}
        if whole and below:
            yield from leaves(whole, prefix=f"{prefix}{name}.")
        elif is_dataclass(kind):
            yield from leaves(kind, below, f"{prefix}{name}.")
        else:
            yield Leaf(prefix + name, kind, section, by_name[name])


def check_keys(values: Mapping[str, Any], schema: type, pipelines: Mapping[str, type]) -> None:
    """Raise a `UserError` for keys of the tree `values` that `schema` lacks, with the nearest known ones.

    pipelines: by name; the error names one that has the key.
    """
    unknown: list[str] = []

    def check(tree: Mapping[str, Any], section: type, prefix: str) -> None:
        known = key_types(section, [name for name, value in tree.items() if isinstance(value, Mapping)])
        for name, value in tree.items():
            key, kind = f"{prefix}{name}", partial_of(section, name) or known.get(name)
            if kind is None:
                unknown.extend([below for below, _ in flatten({key: value})] or [key])
            elif is_dataclass(kind):
                if not isinstance(value, Mapping):
                    raise UserError(f"{key}: is a section, not a value; set {key}.<key>=value")
                check(value, kind, f"{key}.")

    check(values, schema, "")
    if unknown:
        own = [leaf.key for leaf in leaves(schema, values)]
        # Reversed, so that the error names the first pipeline that has the key.
        first_last = reversed(list(pipelines.items()))
        others = {leaf.key: name for name, other in first_last for leaf in leaves(other, values)}
        hints = {
            key: f"python -m spmd_rl.{others[key]} has it" if key in others else _hint(key, own) for key in unknown
        }
        raise UserError(" | ".join(f"{key}: unknown key; {told}" for key, told in hints.items()))


def suggestion(key: str, value: str, schema: type) -> str:
    """Return the override, such as `steps=5`, meant by an option `key`."""
    name, known = key.replace("-", "_"), [leaf.key for leaf in leaves(schema)]
    near = difflib.get_close_matches(name, known, 1, 0.8)
    return f"{near[0]}={value or '...'}" if near else hint(name) or "--help lists all"


def _hint(key: str, known: Sequence[str]) -> str:
    def likeness(other: str) -> float:
        # 1 is the same word in another section; whole keys decide among equals.
        words = [text.rpartition(".")[2] for text in (key, other)]
        whole = difflib.SequenceMatcher(None, key, other).ratio()
        return max(whole, difflib.SequenceMatcher(None, *words).ratio() - 0.1 + whole / 100)

    if key in EARLIER:
        return f"it is now {EARLIER[key]}"
    near = max(known, key=likeness)
    if difflib.SequenceMatcher(None, key, near).ratio() < TYPING_ERROR and (theirs := hint(key)):
        return theirs
    return f"did you mean {near}?" if likeness(near) > UNLIKE else "--help lists all"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a tree's leaves; an empty mapping has none."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_dict(section: Any) -> dict[str, Any]:
    """Turn a section into plain values as a user writes them, inline entries next to its keys."""
    tree: dict[str, Any] = {}
    for field in fields(section):
        value = getattr(section, field.name)
        if "inline" in field.metadata:
            tree |= {name: to_dict(entry) for name, entry in value.items()}
        else:
            tree[field.name] = to_dict(value) if is_dataclass(value) else value
    return tree


def type_name(kind: Any) -> str:
    """Format a type for users: `float`, `str or null`, `list of float`."""
    if get_origin(kind) is UnionType:
        return " or ".join("null" if part is NoneType else type_name(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {type_name(get_args(kind)[0])}"
    return "mapping" if get_origin(kind) is dict else kind.__name__
