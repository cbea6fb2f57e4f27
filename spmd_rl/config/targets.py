"""Plug-ins named in settings: `module:Class`, imported and built. Left out: what the class is for.

Our own packages are never imported by name; a user's file on PYTHONPATH plugs in the same way.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from spmd_rl.errors import UserError

# Whatever somebody's module or constructor may raise, short of a broad `except`: what is not here is a bug of ours,
# or somebody's wish to end the process.
FOREIGN_ERRORS = (
    *(ImportError, SyntaxError, AttributeError, NameError, TypeError, ValueError, LookupError, ArithmeticError),
    *(AssertionError, OSError, RuntimeError, EOFError, MemoryError, BufferError),
)


def import_target(target: str) -> type:
    """The class that `module:Class` names. A `UserError` without a key where there is none."""
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except FOREIGN_ERRORS as error:
        raise UserError(f"{target} cannot be imported: {told(error)}") from error
    if not isinstance(found, type):
        raise UserError(f"{target} cannot be imported: {module_name} has no class {class_name}")
    return found


def build_target(target: str, args: Mapping[str, Any]) -> Any:
    """An instance. A `UserError` without a key where its constructor refuses."""
    constructor = import_target(target)
    try:
        return constructor(**args)
    except FOREIGN_ERRORS as error:
        raise UserError(f"{target} could not be built: {told(error)}") from error


def told(error: BaseException) -> str:
    """An exception in one line: its type, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
