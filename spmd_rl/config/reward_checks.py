"""Checks of `reward` before the process group forms."""

from spmd_rl.config.plugin_checks import PluginSetting, build_plugins, check_packages, check_workers
from spmd_rl.config.ranks import local_rank
from spmd_rl.config.sections.data import GENERATORS, DataConfig, RewardsConfig
from spmd_rl.config.sections.run import JournalConfig
from spmd_rl.errors import UserError
from spmd_rl.plugins.targets import REWARDER, UNPROVIDED

WORKERS_PER_CORE = 64
"""The most workers of rewarders for each core of a machine; those that wait for servers need none of their own"""


def check_rewards(reward: RewardsConfig, journal: JournalConfig, debug: bool, data: DataConfig | None = None) -> None:
    """Check that each rewarder can be imported and built, once per node. Without rows there need not be any."""
    if data and (rows := f"{data.train or ''},{data.eval or ''}").strip(",") and not reward.domains:
        generated = GENERATORS in rows
        known = (
            "reasoning_gym.target=rewards.reasoning_gym:ReasoningGymReward"
            if generated
            else ("math.target=rewards.math_verify:MathReward")
        )
        raise UserError(
            f"reward: no domain has a rewarder; say reward.<domain>.target=module:Class, as in reward.{known}"
            + ("" if generated else "; for questions with a number or formula as the answer data=jsonl_math sets it")
        )
    plugins = []
    for domain, one in reward.domains.items():
        if one.timeout >= journal.stall_seconds and not debug:
            limit = f"journal.stall_seconds={journal.stall_seconds:g}"
            raise UserError(f"reward.{domain}.timeout: {one.timeout:g} s of legal waiting, but {limit} ends the run")
        if one.devices is not None and debug:
            raise UserError(f"reward.{domain}.devices: debug starts no server; give reward.{domain}.args.url")
        services = UNPROVIDED if one.devices is None else {**UNPROVIDED, "url": lambda: "http://127.0.0.1/v1"}
        plugins.append(PluginSetting(f"reward.{domain}", one, REWARDER, services))
    check_packages(plugins)
    check_workers(
        "domains", {f"{plugin.section}.workers": plugin.settings.workers for plugin in plugins}, WORKERS_PER_CORE
    )
    if local_rank() == 0:
        build_plugins(plugins)
