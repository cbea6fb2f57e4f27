"""Checks of `env` before the process group forms."""

from spmd_rl.config.plugin_checks import PluginSetting, build_plugins, check_packages, check_workers
from spmd_rl.config.ranks import local_rank
from spmd_rl.config.sections.env import EnvsConfig
from spmd_rl.config.sections.run import JournalConfig
from spmd_rl.errors import UserError
from spmd_rl.plugins.targets import ENVIRONMENT

WORKERS_PER_CORE = 1024
"""The most workers of environments for each core of a machine: those that wait need none of their own"""


def check_envs(env: EnvsConfig, journal: JournalConfig, debug: bool) -> None:
    """Check that each environment can be imported and built, once per node."""
    plugins, workers = [], {}
    for tag, one in env.tags.items():
        for name in ("reset_timeout", "step_timeout"):
            if (seconds := getattr(one, name)) >= journal.stall_seconds and not debug:
                limit = f"journal.stall_seconds={journal.stall_seconds:g}"
                raise UserError(f"env.{tag}.{name}: {seconds:g} s of legal waiting, but {limit} ends the run")
        plugins.append(PluginSetting(f"env.{tag}", one, ENVIRONMENT))
        alone = one.mode == "process"
        key = f"env.{tag}.workers" + (f" * env.{tag}.envs_per_worker" if alone else "")
        workers[key] = one.workers * (one.envs_per_worker if alone else 1)
    check_packages(plugins)
    check_workers("environments", workers, WORKERS_PER_CORE)
    if local_rank() == 0:
        build_plugins(plugins)
