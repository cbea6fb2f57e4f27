"""`check_args`: what of `engine.args` is the user's to choose."""

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
    """UserError for an argument that the engine does not know, that another setting gives, or that a promise needs.

    of: the class that takes them. ours: argument -> the setting that gives it. leaned_on: argument -> its value.
    reasons: argument -> what would break if it had another one.
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
