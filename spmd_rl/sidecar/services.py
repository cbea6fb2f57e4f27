"""What a sidecar provides to a rewarder that asks for it by the name of a constructor parameter.

A service is made in the process that uses it, once for each rewarder, and ends with that process.

    build_target("reward.code", target, args, services=services("code", "auto"))
"""

from collections.abc import Callable, Mapping
from typing import Any

from spmd_rl.sandbox import open_sandbox
from spmd_rl.types import Http


def services(domain: str, sandbox: str, url: str = "") -> Mapping[str, Callable[[], Any]]:
    """By name, how each is made. `sandbox`: the setting `reward.<domain>.sandbox`. `url`: of the domain's own server,
    if it has one."""
    made: dict[str, Callable[[], Any]] = {
        "sandbox": lambda: open_sandbox(sandbox, f"reward.{domain}.sandbox"),
        "http": build_http,
    }
    return made | {"url": lambda: url} if url else made


def build_http() -> Http:
    """The HTTP client, whose library is loaded by those who use it alone."""
    from spmd_rl.sidecar.http import HttpService

    return HttpService()
