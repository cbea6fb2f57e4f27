"""Checks of single values, for `__post_init__` in `sections/`.

They take a section and `key=bound` pairs, accept None (an optional key), and raise a `UserError` that begins with the
key; the loader prepends the section.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.types import unknown_fields

_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def one_of(section: Any, **known: Sequence[str]) -> None:
    """Check that each key holds a known name.

    YAML's bare `off` or `on`, a boolean, becomes a name again.
    """
    for key, names in known.items():
        value = getattr(section, key)
        # OmegaConf converts the boolean of a str field to `False` or `True`.
        if (word := {"False": "off", "True": "on"}.get(value)) in names:
            setattr(section, key, value := word)
        if value is not None and value not in names:
            raise UserError(f"{key}: unknown name {value!r}; known: {', '.join(names)}")


def at_least(section: Any, **bounds: float) -> None:
    """Check that each key is finite and at least its bound."""
    for key, bound in bounds.items():
        value = getattr(section, key)
        if value is not None and not bound <= value < math.inf:
            raise UserError(f"{key}: must be at least {bound}, not {value}")


def above(section: Any, **bounds: float) -> None:
    """Check that each key is finite and above its bound."""
    for key, bound in bounds.items():
        value = getattr(section, key)
        if value is not None and not bound < value < math.inf:
            raise UserError(f"{key}: must be greater than {bound}, not {value}")


def within(section: Any, **bounds: tuple[float, float]) -> None:
    """Check that each key is between its bounds, inclusive."""
    for key, (low, high) in bounds.items():
        value = getattr(section, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"{key}: must be between {low} and {high}, not {value}")


def require(holds: bool, message: str) -> None:
    """Raise a `UserError` unless `holds`; `message` begins with the key."""
    if not holds:
        raise UserError(message)


def check_fields(section: Any, **known: Sequence[str]) -> None:
    """Check that each template has only known `{fields}`."""
    for key, names in known.items():
        if unknown := unknown_fields(getattr(section, key), names):
            told = ", ".join(f"{{{name}}}" for name in names)
            raise UserError(f"{key}: unknown {', '.join(unknown)}; known: {told}")


def numbers_in(key: str, text: str, count: int, what: str, like: str) -> list[int]:
    """Return the ascending numbers of a text such as `0-3,8`.

    UserError, before ranges expand, unless all rise and stay below `count`. what: a singular noun, like: an example,
    both for the error.
    """
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        require((ends := _RANGE.fullmatch(part)) is not None, f"{key}: must be {like}, not {text!r}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        require(first <= last, f"{key}: {part} is in reverse order; write {last}-{first}")
        require(last < count, f"{key}: there is no {what} {last} among {count} {what}s")
        found.update(range(first, last + 1))
    return sorted(found)
