"""The dotted keys of a schema: its leaves, their types, and the key nearest to a misspelt one.

A section whose entries stand beside its own keys (`reward.math.*` beside `reward.error_budget`) holds them in a field
marked `metadata={"inline": "<domain>"}`, of type `dict[str, <section>]`.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from spmd_rl.errors import UserError


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting, such as `rollout.temperature`."""

    key: str
    type: Any
    section: type
    """The dataclass that declares it"""
    field: Field


def inline_field(section: type) -> Field | None:
    """Return the field that holds the inline entries of a section; None if it has none."""
    return next((field for field in fields(section) if "inline" in field.metadata), None)


def entry_type(section: type) -> type:
    """Return the dataclass of an inline entry of `section`."""
    holder = inline_field(section)
    assert holder is not None
    return get_args(get_type_hints(section)[holder.name])[1]


def own_keys(section: type) -> dict[str, Any]:
    """Return the name and type of each key of the section itself; a dataclass type is a section of its own."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section) if "inline" not in field.metadata}


def leaves(section: type, entries: Mapping[str, Any] | None = None, prefix: str = "") -> Iterator[Leaf]:
    """Yield all settings below `section`, in order of declaration.

    Inline entries are those that the tree of values `entries` names; without any, a placeholder stands for them
    (`reward.<domain>.target`).
    """
    given = entries if isinstance(entries, Mapping) else {}
    by_name = {field.name: field for field in fields(section)}
    known = own_keys(section)
    for name, kind in known.items():
        if is_dataclass(kind):
            yield from leaves(kind, given.get(name), f"{prefix}{name}.")
        else:
            yield Leaf(prefix + name, kind, section, by_name[name])
    if holder := inline_field(section):
        for name in [n for n in given if n not in known] or [holder.metadata["inline"]]:
            yield from leaves(entry_type(section), given.get(name), f"{prefix}{name}.")


def check_keys(values: Mapping[str, Any], schema: type) -> None:
    """Raise a `UserError` for the first key of the tree `values` that `schema` lacks, naming the nearest known key."""
    known = [leaf.key for leaf in leaves(schema, values)]
    for key, section in _unknown_keys(values, schema, ""):
        if section:
            raise UserError(f"{key}: is a section, not a value; say {key}.<key>=value")
        raise UserError(f"{key}: unknown key; did you mean {nearest(key, known)}?")


def _unknown_keys(values: Mapping[str, Any], section: type, prefix: str) -> Iterator[tuple[str, bool]]:
    """Yield each key that is unknown, with False, and each section that was given a value, with True."""
    known, inline = own_keys(section), inline_field(section)
    for name, value in values.items():
        key = f"{prefix}{name}"
        kind = known.get(name)
        if kind is None and inline and isinstance(value, Mapping):
            kind = entry_type(section)
        if kind is None:
            yield next(flatten({key: value}), (key, value))[0], False
        elif is_dataclass(kind) and isinstance(value, Mapping):
            yield from _unknown_keys(value, kind, f"{key}.")
        elif is_dataclass(kind):
            yield key, True


def nearest(key: str, known: list[str]) -> str:
    """Return the known key that is most similar to `key`."""
    return max(known, key=lambda other: difflib.SequenceMatcher(None, key, other).ratio())


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each leaf of a tree of mappings; an empty mapping has none."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_dict(section: Any) -> dict[str, Any]:
    """Turn a section into a tree of plain values as a user writes it, inline entries beside the section's own keys."""
    tree: dict[str, Any] = {}
    for field in fields(section):
        value = getattr(section, field.name)
        if "inline" in field.metadata:
            tree |= {name: to_dict(entry) for name, entry in value.items()}
        else:
            tree[field.name] = to_dict(value) if is_dataclass(value) else value
    return tree


def type_name(kind: Any) -> str:
    """Format a type for a user: `float`, `str or null`, `list of float`."""
    if get_origin(kind) is UnionType:
        return " or ".join("null" if part is NoneType else type_name(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {type_name(get_args(kind)[0])}"
    return "mapping" if get_origin(kind) is dict else kind.__name__
