"""Plug-ins that settings name as `module:Class` or `module:function`: imported, checked, built. Standard library only.

A user's file on PYTHONPATH takes precedence over our packages. Each plug-in is built once to find mistakes early; a
worker builds those that do the work.
"""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from spmd_rl.base.errors import UserError, located, one_line, traceback_of
from spmd_rl.base.reward_function import reward_of
from spmd_rl.bundled import PLUGINS

SERVICES = frozenset({"sandbox", "http", "url", "embed"})
"""Constructor parameters that request services of a sidecar (`sidecar/services.py`)."""
UNPROVIDED: Mapping[str, Callable[[], Any]] = {"sandbox": lambda: None, "http": lambda: None}
"""Placeholders for plug-ins that are built only as a check."""


@dataclass(frozen=True)
class PluginKind:
    """The requirements of a kind of plug-in."""

    verbs: tuple[str, ...]
    needs_all: bool
    """True if all methods are required, False if one suffices."""
    of_function: Callable[[Callable[..., Any], Mapping[str, Any]], Any]
    """Factory for a plug-in that is a function; gets the function and its arguments."""

    def check(self, where: str, plugin: Any) -> None:
        """Raise UserError unless a class or an object has the methods."""
        missing = [f"`{verb}`" for verb in self.verbs if not hasattr(plugin, verb)]
        if self.needs_all and missing:
            raise UserError(f"{where} has no {' and no '.join(missing)}")
        if len(missing) == len(self.verbs):
            raise UserError(f"{where} has neither {' nor '.join(missing)}")


def _made_by(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    return function(**given)


REWARDER = PluginKind(("score", "score_batch"), needs_all=False, of_function=reward_of)
"""A function is called for each answer."""
ENVIRONMENT = PluginKind(("reset", "step"), needs_all=True, of_function=_made_by)
"""A function returns an environment."""


def import_target(key: str, target: str) -> Callable[..., Any]:
    """Import the class or function that the setting `key` names. UserError if that fails."""
    module_name, name, file, found = _import(key, target)
    if not callable(found):
        line = f"{key}: {target} cannot be imported: {module_name} has no class {name} and no such function"
        raise UserError(f"{line} ({file})")
    return found


def import_coroutine(key: str, target: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    """Import the one-argument `async def` that the setting `key` names. UserError if it is missing."""
    module_name, name, file, found = _import(key, target)
    if not inspect.iscoroutinefunction(found):
        raise UserError(f"{key}: {target} cannot be used: {module_name} has no `async def {name}` ({file})")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise UserError(f"{key}: {target} cannot be called with one argument, its context: {error}") from None
    return found


def _import(key: str, target: str) -> tuple[str, str, str, Any]:
    module_name, _, name = target.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        module = module_name.removesuffix(".py").rpartition("/")[2]
        raise UserError(
            f"{key}: {target}: must be a module, not a file; write {module}:{name} with its folder on PYTHONPATH"
        )
    with _user_code(f"{key}: {target} cannot be imported"):
        try:
            module = importlib.import_module(_found_as(module_name))
        except ModuleNotFoundError as error:
            # A missing module that the target itself imports is the user's next mistake, not a wrong search path.
            if f"{module_name}.".startswith(f"{error.name}."):
                error.msg += f"; looked in {_places(module_name)}"
            raise
        return module_name, name, getattr(module, "__file__", None) or "no file", getattr(module, name, None)


def _found_as(module: str) -> str:
    ours = f"spmd_rl.bundled.{module}"
    return ours if module.partition(".")[0] in PLUGINS and not _is_there(module) and _is_there(ours) else module


def _is_there(module: str) -> bool:
    # This runs the packages above the module, but no other code.
    inside: Any = ()
    for name in accumulate(module.split("."), "{}.{}".format):
        spec = importlib.util.find_spec(name) if inside is not None else None
        if spec is None:
            return False
        inside = spec.submodule_search_locations
    return True


def _places(module: str) -> str:
    folders = (entry or "." for entry in sys.path if not entry.startswith((sys.prefix, sys.base_prefix)))
    ours = ["spmd_rl itself"] if module.partition(".")[0] in PLUGINS else []
    there = dict.fromkeys(folder for folder in folders if Path(folder).is_dir())
    return ", ".join([*there, "what is installed", *ours])


def build_target(
    section: str,
    target: str,
    args: Mapping[str, Any],
    kind: PluginKind = REWARDER,
    services: Mapping[str, Callable[[], Any]] = UNPROVIDED,
) -> Any:
    """Build `<section>.target` with `<section>.args` and the services that it asks for by parameter name.

    `services` holds factories; a constructor parameter `services` gets the factories themselves, one named `build` this
    function with the same services: `build(section, target, args)`. A function in place of a class gets all these as
    its arguments. UserError if the target is not of this kind or cannot be built.
    """
    key = f"{section}.target"
    constructor = import_target(key, target)
    is_class = isinstance(constructor, type)
    if is_class:
        kind.check(f"{key}: {target}", constructor)
    wanted = {name: required for name, required in _parameters(constructor) if name in SERVICES and name not in args}
    if missing := [name for name, required in wanted.items() if required and name not in services]:
        if missing[0] == "url":
            raise UserError(f"{section}.args.url: must be given, or {section}.devices, which starts a server for it")
        raise UserError(f"{key}: {target} needs the `{missing[0]}` service, which this version does not have")
    provided = {name: services[name]() for name in wanted if name in services}
    names = dict(_parameters(constructor))
    if "services" in names:
        # The factories themselves, for parts that a plug-in builds on its own.
        provided["services"] = services
    if "build" in names and "build" not in args:
        provided["build"] = partial(build_target, kind=kind, services=services)
    with _user_code(f"{key}: {target} cannot be {'built' if is_class else 'called'} with {section}.args={dict(args)}"):
        if unknown := _unknown(constructor, args):
            raise TypeError(f"unexpected keyword argument '{unknown}'; '~{section}.args.{unknown}' removes it")
        built = constructor(**args, **provided) if is_class else kind.of_function(constructor, {**args, **provided})
    kind.check(f"{key}: {target}", built)
    return built


def start_target(section: str, target: str, built: Any) -> None:
    """Call a plug-in's `start()`, if any, in the process where it will work. UserError if it raises."""
    if hasattr(built, "start"):
        with _user_code(f"{section}.target: {target} cannot start"):
            built.start()


def guarded(function: Callable[..., Any], line: str, given: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the user's function with the keyword arguments `given`. Its exceptions become UserErrors of one line, with
    file and line of the user's code and a traceback as report.
    """

    def call(*args: Any) -> Any:
        try:
            return function(*args, **given)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{line}: {located(error)}", traceback_of(error)) from error

    return call


def source_digest(target: str) -> str:
    """Return a digest of the module's file in `module:name`; empty without a file."""
    try:
        spec = importlib.util.find_spec(_found_as(target.partition(":")[0]))
    except (ImportError, ValueError):
        return ""
    path = Path(spec.origin) if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        return ""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


@contextmanager
def _user_code(line: str) -> Iterator[None]:
    """Turn exceptions of a user's import or constructor into a UserError: `line`, then the cause."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{line}: {error}") from error
    # A module that exits on import cannot be used either: SystemExit is no Exception.
    except (Exception, SystemExit) as error:
        raise UserError(f"{line}: {one_line(error)}") from error


def _unknown(constructor: Callable[..., Any], args: Mapping[str, Any]) -> str:
    parameters = inspect.signature(constructor).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    return next((name for name in args if name not in parameters), "")


def _parameters(constructor: Callable[..., Any]) -> list[tuple[str, bool]]:
    parameters = inspect.signature(constructor).parameters.values()
    return [(parameter.name, parameter.default is parameter.empty) for parameter in parameters]
