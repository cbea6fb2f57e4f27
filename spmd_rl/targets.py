"""Plug-ins that settings name as `module:Class` or `module:function`: imported, checked, built. Standard library only.

Our own packages are never imported by name; a user's file on PYTHONPATH plugs in the same way. The settings' checks
build each plug-in once to find mistakes early; a worker builds those that do the work.
"""

import importlib
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spmd_rl.errors import UserError, one_line

SERVICES = frozenset({"sandbox", "http", "url", "embed"})
"""The names of constructor parameters that stand for services of a sidecar (`sidecar/services.py`)."""
UNPROVIDED: Mapping[str, Callable[[], Any]] = {"sandbox": lambda: None, "http": lambda: None}
"""Placeholders for services where a plug-in is only built to see whether it can be."""
REWARDER = ("score", "score_batch")
"""A rewarder has one of these methods."""


def import_target(key: str, target: str) -> type:
    """Import the class that the setting `key` names. UserError, in one line, if that fails for whatever reason."""
    module_name, class_name, found = _import(key, target)
    if not isinstance(found, type):
        raise UserError(f"{key}: {target} cannot be imported: {module_name} has no class {class_name}")
    return found


def import_coroutine(key: str, target: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    """The `async def` of one argument that settings key `key` names. UserError, in one line, if there is none."""
    module_name, name, found = _import(key, target)
    if not inspect.iscoroutinefunction(found):
        raise UserError(f"{key}: {target} cannot be used: {module_name} has no `async def {name}`")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise UserError(f"{key}: {target} cannot be called with one argument, its context: {error}") from None
    return found


def _import(key: str, target: str) -> tuple[str, str, Any]:
    """Module name, name, and what the module has under it, or None."""
    module_name, _, name = target.partition(":")
    with _user_code(f"{key}: {target} cannot be imported"):
        return module_name, name, getattr(importlib.import_module(module_name), name, None)


def build_target(
    section: str,
    target: str,
    args: Mapping[str, Any],
    verbs: tuple[str, ...] = REWARDER,
    services: Mapping[str, Callable[[], Any]] = UNPROVIDED,
) -> Any:
    """Build what `<section>.target` names, with `<section>.args` and the services that it asks for by parameter name.

    `services` holds a factory for each service; a constructor parameter named `services` gets the factories themselves.
    UserError, in one line, if the class has none of the methods `verbs` or cannot be built.
    """
    key = f"{section}.target"
    constructor = import_target(key, target)
    if not any(hasattr(constructor, verb) for verb in verbs):
        raise UserError(f"{key}: {target} has neither {' nor '.join(f'`{verb}`' for verb in verbs)}")
    wanted = {name: required for name, required in _parameters(constructor) if name in SERVICES and name not in args}
    if missing := [name for name, required in wanted.items() if required and name not in services]:
        if missing[0] == "url":
            raise UserError(f"{section}.args.url: not given; or name {section}.devices for a server of its own")
        raise UserError(f"{key}: {target} needs the `{missing[0]}` service, which this version does not have")
    provided = {name: services[name]() for name in wanted if name in services}
    if "services" in dict(_parameters(constructor)):
        provided["services"] = services  # for parts of its own
    with _user_code(f"{key}: {target} cannot be built with {section}.args={dict(args)}"):
        return constructor(**args, **provided)


def start_target(section: str, target: str, built: Any) -> None:
    """Call a plug-in's `start()`, if it has one, in the process where it will work: it loads what is heavy.

    UserError, in one line, if it raises.
    """
    if hasattr(built, "start"):
        with _user_code(f"{section}.target: {target} cannot start"):
            built.start()


@contextmanager
def _user_code(line: str) -> Iterator[None]:
    """Turn whatever a user's import or constructor raises into a UserError: `line`, then the cause."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{line}: {one_line(error)}") from error


def _parameters(constructor: type) -> list[tuple[str, bool]]:
    """Return the name of each parameter and whether it is required."""
    parameters = inspect.signature(constructor).parameters.values()
    return [(parameter.name, parameter.default is parameter.empty) for parameter in parameters]
