"""Checks of `reward` before the process group forms."""

from typing import Any

from spmd_rl.config.plugin_checks import Plugin, build_plugins, check_packages, check_workers
from spmd_rl.config.ranks import local_rank
from spmd_rl.config.sections.data import GENERATORS
from spmd_rl.errors import UserError
from spmd_rl.targets import REWARDER, UNPROVIDED

WORKERS_PER_CORE = 64
"""The most workers of rewarders for each core of a machine; those that wait for servers need none of their own"""


def check_rewards(cfg: Any) -> None:
    """Check that each rewarder can be imported and built, once per node."""
    if not cfg.reward.domains:
        generated = GENERATORS in cfg.data.train
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
    for domain, reward in cfg.reward.domains.items():
        if reward.timeout >= cfg.journal.stall_seconds and not cfg.debug:
            limit = f"journal.stall_seconds={cfg.journal.stall_seconds:g}"
            raise UserError(f"reward.{domain}.timeout: {reward.timeout:g} s of legal waiting, but {limit} ends the run")
        if reward.devices is not None and cfg.debug:
            raise UserError(f"reward.{domain}.devices: debug starts no server; give reward.{domain}.args.url")
        services = UNPROVIDED if reward.devices is None else {**UNPROVIDED, "url": lambda: "http://127.0.0.1/v1"}
        plugins.append(Plugin(f"reward.{domain}", reward, REWARDER, services))
    check_packages(plugins)
    check_workers(
        "domains", {f"{plugin.section}.workers": plugin.settings.workers for plugin in plugins}, WORKERS_PER_CORE
    )
    if local_rank() == 0:
        build_plugins(plugins)
