"""Checks of `reward` and `env` before the process group forms: plug-ins are built once per node."""

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.base.process import contained
from spmd_rl.base.targets import ENVIRONMENT, REWARDER, UNPROVIDED, PluginKind, build_target
from spmd_rl.config.ranks import local_rank
from spmd_rl.config.sections.algorithm import AlgorithmConfig
from spmd_rl.config.sections.data import GENERATORS, DataConfig, RewardConfig, RewardsConfig
from spmd_rl.config.sections.env import EnvConfig, EnvsConfig
from spmd_rl.config.sections.run import JournalConfig

# Most of them wait: rewarders for servers, environments for turns.
REWARDERS_PER_CORE, ENVIRONMENTS_PER_CORE = 64, 1024
"""Most workers per core of a machine"""


@dataclass(frozen=True)
class PluginSetting:
    """A plug-in to check, with section, settings and services."""

    section: str
    settings: RewardConfig | EnvConfig
    kind: PluginKind
    services: Mapping[str, Callable[[], Any]] = field(default_factory=lambda: UNPROVIDED)

    def build(self) -> None:
        """Build the plug-in; UserError if that fails."""
        variants = [self.settings.args]
        if isinstance(self.settings, EnvConfig) and self.settings.eval_args:
            variants.append({**self.settings.args, **self.settings.eval_args})
        for args in variants:
            build_target(self.section, self.settings.target, args, self.kind, self.services)


def check_rewards(reward: RewardsConfig, journal: JournalConfig, debug: bool, data: DataConfig | None = None) -> None:
    """Check that each rewarder can be built. Without rows none is needed."""
    if (
        data
        and data.needs_rewarder
        and (rows := f"{data.train or ''},{data.eval or ''}").strip(",")
        and not reward.domains
    ):
        generated = GENERATORS in rows
        known = (
            "reasoning_gym.target=rewards.reasoning_gym:ReasoningGymReward"
            if generated
            else ("math.target=rewards.math_verify:MathReward")
        )
        raise UserError(
            f"reward: no domain has a rewarder; set reward.<domain>.target=module:Class, such as reward.{known}"
            + ("" if generated else "; for questions with a number or formula as the answer data=jsonl_math sets it")
        )
    plugins = []
    for domain, one in reward.domains.items():
        _check_timeout(f"reward.{domain}.timeout", one.timeout, journal, debug)
        if one.devices is not None and debug:
            raise UserError(f"reward.{domain}.devices: debug=true starts no server; set reward.{domain}.args.url")
        services = UNPROVIDED if one.devices is None else {**UNPROVIDED, "url": lambda: "http://127.0.0.1/v1"}
        plugins.append(PluginSetting(f"reward.{domain}", one, REWARDER, services))
    workers = {f"{plugin.section}.workers": plugin.settings.workers for plugin in plugins}
    _check_plugins("domains", plugins, workers, REWARDERS_PER_CORE)


def check_reward_weights(algorithm: AlgorithmConfig, reward: RewardsConfig) -> None:
    """Check that composite rewarders have the parts of `algorithm.reward_weights`; others' parts are known only
    after a verdict."""
    for domain, one in reward.domains.items():
        parts = one.args.get("parts") if one.target.endswith(":CompositeReward") else None
        for name in algorithm.reward_weights if isinstance(parts, Mapping) else ():
            if name not in parts and name.partition(".")[0] not in parts:
                has = ", ".join(sorted(parts))
                raise UserError(f"algorithm.reward_weights.{name}: reward.{domain} has no such part; it has {has}")


def check_envs(env: EnvsConfig, journal: JournalConfig, debug: bool) -> None:
    """Check that each environment can be built."""
    plugins, workers = [], {}
    for tag, one in env.tags.items():
        for name in ("reset_timeout", "step_timeout"):
            _check_timeout(f"env.{tag}.{name}", getattr(one, name), journal, debug)
        plugins.append(PluginSetting(f"env.{tag}", one, ENVIRONMENT))
        alone = one.mode == "process"
        key = f"env.{tag}.workers" + (f" * env.{tag}.envs_per_worker" if alone else "")
        workers[key] = one.workers * (one.envs_per_worker if alone else 1)
    _check_plugins("environments", plugins, workers, ENVIRONMENTS_PER_CORE)


def _check_timeout(key: str, seconds: float, journal: JournalConfig, debug: bool) -> None:
    if seconds >= journal.stall_seconds and not debug:
        limit = f"journal.stall_seconds={journal.stall_seconds:g}"
        raise UserError(f"{key}: a call may take {seconds:g} s, but {limit} ends the run; raise that, or lower this")


def _check_plugins(what: str, plugins: list[PluginSetting], workers: Mapping[str, int], per_core: int) -> None:
    for plugin in plugins:
        if missing := [name for name in plugin.settings.packages if not installed(name)]:
            raise UserError(f"{plugin.section}.packages: {missing[0]} is not installed here")
    cores = os.cpu_count() or 1
    if (total := sum(workers.values())) > (most := per_core * cores):
        largest = max(workers, key=lambda key: workers[key])
        raise UserError(
            f"{largest}: {workers[largest]} (all {what}: {total}) is too many for the {cores} cores of "
            f"this machine: at most {most} processes"
        )
    # Once per node: each rank would import and build the same plug-ins at the same time.
    if local_rank() == 0:
        build_plugins(plugins)


def build_plugins(plugins: Iterable[PluginSetting]) -> None:
    """Check that each plug-in can be built, in a forked process, where it may do anything."""
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
    """Return True if a module or distribution is installed."""
    try:
        return importlib.util.find_spec(name) is not None or bool(importlib.metadata.version(name))
    except (ImportError, ValueError):  # PackageNotFoundError is an ImportError
        return False
