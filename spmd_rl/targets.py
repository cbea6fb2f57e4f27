"""Plug-ins named in settings as `module:Class`: imported, looked at, built. Standard library only.

Our own packages are never imported by name; a user's file on PYTHONPATH plugs in the same way. The settings' checks
build each plug-in once to find mistakes early, a worker builds those that do the work. What a class is for is not known
here.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spmd_rl.errors import UserError, one_line

SERVICES = frozenset({"sandbox", "http", "embed"})
"""Constructor parameters of these names stand for services that a sidecar provides. None is built yet."""
REWARDER = ("score", "score_batch")
"""What a rewarder offers: one of these."""


def import_target(key: str, target: str) -> type:
    """The class that settings key `key` names. UserError, in one line, for whatever keeps it from being had."""
    module_name, _, class_name = target.partition(":")
    with _foreign(f"{key}: {target} cannot be imported"):
        found = getattr(importlib.import_module(module_name), class_name, None)
    if not isinstance(found, type):
        raise UserError(f"{key}: {target} cannot be imported: {module_name} has no class {class_name}")
    return found


def build_target(section: str, target: str, args: Mapping[str, Any], verbs: tuple[str, ...] = REWARDER) -> Any:
    """An instance of what `<section>.target` names, with `<section>.args`. UserError, in one line, if it cannot be."""
    key = f"{section}.target"
    constructor = import_target(key, target)
    if not any(hasattr(constructor, verb) for verb in verbs):
        raise UserError(f"{key}: {target} has neither {' nor '.join(f'`{verb}`' for verb in verbs)}")
    if missing := sorted(_required(constructor) & SERVICES - set(args)):
        raise UserError(f"{key}: {target} needs the `{missing[0]}` service, which this version does not have")
    with _foreign(f"{key}: {target} cannot be built with {section}.args={dict(args)}"):
        return constructor(**args)


@contextmanager
def _foreign(line: str) -> Iterator[None]:
    """Somebody's import or constructor may raise anything: a mistake of theirs, told with its cause after `line`."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{line}: {one_line(error)}") from error


def _required(constructor: type) -> set[str]:
    try:
        parameters = inspect.signature(constructor).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {parameter.name for parameter in parameters if parameter.default is parameter.empty}
