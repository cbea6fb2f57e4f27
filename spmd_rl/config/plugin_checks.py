"""Checks of plug-ins before the process group forms: each is imported and built once, where it does no harm."""

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.sections.data import RewardConfig
from spmd_rl.config.sections.env import EnvConfig
from spmd_rl.errors import UserError
from spmd_rl.plugins.targets import UNPROVIDED, PluginKind, build_target
from spmd_rl.process import contained


@dataclass(frozen=True)
class PluginSetting:
    """A plug-in to check: where it is set, what is set there, and what it gets."""

    section: str
    settings: RewardConfig | EnvConfig
    kind: PluginKind
    services: Mapping[str, Callable[[], Any]] = field(default_factory=lambda: UNPROVIDED)

    def build(self) -> None:
        """Build it. UserError if that fails."""
        variants = [self.settings.args]
        if isinstance(self.settings, EnvConfig) and self.settings.eval_args:
            variants.append({**self.settings.args, **self.settings.eval_args})
        for args in variants:
            build_target(self.section, self.settings.target, args, self.kind, self.services)


def check_packages(plugins: Iterable[PluginSetting]) -> None:
    """Check that the packages for the sandbox are installed."""
    for plugin in plugins:
        if missing := [name for name in plugin.settings.packages if not installed(name)]:
            raise UserError(f"{plugin.section}.packages: {missing[0]} is not installed here")


def check_workers(what: str, workers: Mapping[str, int], per_core: int) -> None:
    """Check that the processes of all `what` together, by the key that sets their number, fit on this machine."""
    cores = os.cpu_count() or 1
    if (total := sum(workers.values())) > (most := per_core * cores):
        largest = max(workers, key=lambda key: workers[key])
        raise UserError(
            f"{largest}: {workers[largest]} (all {what}: {total}) is too many for the {cores} cores of "
            f"this machine: at most {most} processes"
        )


def build_plugins(plugins: Iterable[PluginSetting]) -> None:
    """Check that each can be imported and built, in a process of its own: a plug-in may do anything there."""
    by_section = {plugin.section: plugin for plugin in plugins}

    def build(say: Callable[[str], None]) -> None:
        for section, plugin in by_section.items():
            say(json.dumps([section]))
            try:
                plugin.build()
            except UserError as error:
                say(json.dumps([section, str(error), error.report]))
                return

    if not by_section:
        return
    lines, end = contained(build, max(plugin.settings.start_seconds for plugin in by_section.values()))
    section, *error = json.loads(lines[-1])
    if error:
        raise UserError(*error)
    if end:
        where = f"{section}.target: {by_section[section].settings.target}"
        raise UserError(f"{where} {end} while it is imported or built ({section}.start_seconds)")


def installed(name: str) -> bool:
    """Return whether a module or a distribution of that name is installed."""
    try:
        return importlib.util.find_spec(name) is not None or bool(importlib.metadata.version(name))
    except (ImportError, ValueError):  # PackageNotFoundError is an ImportError
        return False
