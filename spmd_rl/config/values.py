"""Checks of single values, called from the `__post_init__` of the settings' dataclasses in `sections/`.

Each takes the section and `key=bound` pairs, lets None pass (the key is optional), and raises a `UserError` whose line
begins with the bare key; the loader puts the section in front, so that the user reads the dotted key.
"""

import math
from collections.abc import Sequence
from typing import Any

from spmd_rl.errors import UserError


def one_of(section: Any, **known: Sequence[str]) -> None:
    """Each key holds one of the known names."""
    for key, names in known.items():
        value = getattr(section, key)
        if value is not None and value not in names:
            raise UserError(f"{key}: unknown name {value!r}; known: {', '.join(names)}")


def at_least(section: Any, **bounds: float) -> None:
    """Each key holds a finite number, its bound or more."""
    for key, bound in bounds.items():
        value = getattr(section, key)
        if value is not None and not bound <= value < math.inf:
            raise UserError(f"{key}: must be at least {bound}, not {value}")


def above(section: Any, **bounds: float) -> None:
    """Each key holds a finite number greater than its bound."""
    for key, bound in bounds.items():
        value = getattr(section, key)
        if value is not None and not bound < value < math.inf:
            raise UserError(f"{key}: must be greater than {bound}, not {value}")


def within(section: Any, **bounds: tuple[float, float]) -> None:
    """Each key holds a number between its two bounds, both included."""
    for key, (low, high) in bounds.items():
        value = getattr(section, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"{key}: must be between {low} and {high}, not {value}")


def require(holds: bool, line: str) -> None:
    """Whatever has no name above. `line` begins with the key."""
    if not holds:
        raise UserError(line)
