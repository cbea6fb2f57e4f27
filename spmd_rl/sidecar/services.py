"""The services that a sidecar provides to a rewarder or environment which names them as constructor parameters.

A service is made once for each of them, in the process that uses it, and ends with that process.

    build_target("reward.code", target, args, services=service_factories("reward.code", "auto"))
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_rl.sandbox import open_sandbox
from spmd_rl.types import Http


def service_factories(
    section: str, sandbox: str, url: str = "", packages: Sequence[str] = ()
) -> Mapping[str, Callable[[], Any]]:
    """Return by name how each service is made.

    `sandbox` and `packages` are the settings of that name in `section`: `reward.<domain>` or `env.<tag>`; `url` is the
    address of the domain's own server, if it has one.
    """
    factories: dict[str, Callable[[], Any]] = {
        "sandbox": lambda: open_sandbox(sandbox, f"{section}.sandbox", packages),
        "http": build_http,
    }
    return factories | {"url": lambda: url} if url else factories


def build_http() -> Http:
    """Return an HTTP client. Its library is imported here, only where a rewarder asks for it."""
    from spmd_rl.sidecar.http import HttpService

    return HttpService()
