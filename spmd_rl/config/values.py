"""Checks of single values, for the `__post_init__` of the dataclasses in `sections/`.

Each check takes the section and `key=bound` pairs, accepts None (the key is optional), and raises a `UserError` whose
message begins with the key; the loader puts the name of the section before it.
"""

import math
from collections.abc import Sequence
from typing import Any

from spmd_rl.errors import UserError


def one_of(section: Any, **known: Sequence[str]) -> None:
    """Check that each key holds one of the known names.

    YAML reads a bare `off` or `on` as false or true: where that is a name, it is put back.
    """
    for key, names in known.items():
        value = getattr(section, key)
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
