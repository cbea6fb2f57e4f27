"""Checks of single values, for the `__post_init__` of the dataclasses in `sections/`.

Each check takes the section and `key=bound` pairs, accepts None (the key is optional), and raises a `UserError` whose
message begins with the key; the loader puts the name of the section before it.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.types import unknown_fields

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def one_of(section: Any, **known: Sequence[str]) -> None:
    """Check that each key holds one of the known names.

    YAML reads a bare `off` or `on` as false or true, which is reverted for names.
    """
    for key, names in known.items():
        value = getattr(section, key)
        # OmegaConf converts the boolean of a str field to `False` or `True`.
        if (word := {"False": "off", "True": "on"}.get(value)) in names:
            setattr(section, key, value := word)
        if value is not None and value not in names:
            raise UserError(f"{key}: unknown name {value!r}; known: {', '.join(names)}")


def at_least(section: Any, **bounds: float) -> None:
    """Check that each key holds a finite number that is at least its bound."""
    for key, bound in bounds.items():
        value = getattr(section, key)
        if value is not None and not bound <= value < math.inf:
            raise UserError(f"{key}: must be at least {bound}, not {value}")


def above(section: Any, **bounds: float) -> None:
    """Check that each key holds a finite number greater than its bound."""
    for key, bound in bounds.items():
        value = getattr(section, key)
        if value is not None and not bound < value < math.inf:
            raise UserError(f"{key}: must be greater than {bound}, not {value}")


def within(section: Any, **bounds: tuple[float, float]) -> None:
    """Check that each key holds a number between its two bounds, both included."""
    for key, (low, high) in bounds.items():
        value = getattr(section, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"{key}: must be between {low} and {high}, not {value}")


def require(holds: bool, message: str) -> None:
    """Raise a `UserError` with `message`, which begins with the key, unless `holds`."""
    if not holds:
        raise UserError(message)


def check_fields(section: Any, **known: Sequence[str]) -> None:
    """Check that each key holds a template whose `{fields}` are all among the known ones."""
    for key, names in known.items():
        if unknown := unknown_fields(getattr(section, key), names):
            told = ", ".join(f"{{{name}}}" for name in names)
            raise UserError(f"{key}: unknown {', '.join(unknown)}; known: {told}")


def numbers_in(key: str, text: str, count: int, what: str, like: str) -> list[int]:
    """Return the numbers in a text such as `0-3,8`, ascending.

    UserError, before any range is expanded, unless all of them rise and stay below `count`. what: a singular noun, and
    like: an example, for the error.
    """
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        require((ends := _RANGE.fullmatch(part)) is not None, f"{key}: must be {like}, not {text!r}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        require(first <= last, f"{key}: {part} is in reverse order; write {last}-{first}")
        require(last < count, f"{key}: there is no {what} {last} among {count} {what}s")
        found.update(range(first, last + 1))
    return sorted(found)
