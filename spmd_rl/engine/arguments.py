"""`check_args`: validation of the user's `engine.args`."""

import inspect
from collections.abc import Mapping
from typing import Any

from spmd_rl.base.errors import UserError


def check_args(
    args: Mapping[str, Any],
    of: type,
    ours: Mapping[str, str],
    leaned_on: Mapping[str, Any],
    reasons: Mapping[str, str] | None = None,
) -> None:
    """Raise a UserError for an argument that is unknown, that another setting sets, or that this program fixes.

    of: class of the arguments. ours: argument -> setting. leaned_on: argument -> required value. reasons: argument ->
    consequence of another value.
    """
    known = inspect.signature(of).parameters
    for name in args:
        if name not in known:
            raise UserError(f"engine.args.{name}: {of.__module__.split('.')[0]}'s {of.__name__} has no such argument")
        if name in ours:
            raise UserError(f"engine.args.{name}: {ours[name]} says this")
        if name in leaned_on:
            reason = (reasons or {}).get(name, "which the engine leans on")
            raise UserError(f"engine.args.{name}: is {leaned_on[name]!r}, {reason}")
