"""Services that a sidecar passes to rewarders and environments as constructor parameters, each created once per
rewarder.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_rl.sandbox import open_sandbox
from spmd_rl.types import Http


def service_factories(
    section: str, sandbox: str, url: str = "", packages: Sequence[str] = ()
) -> Mapping[str, Callable[[], Any]]:
    """Return a factory of each service, by name.

    sandbox, packages: settings in `section`, which is `reward.<domain>` or `env.<tag>`. url: address of the domain's
    server, if any.
    """
    factories: dict[str, Callable[[], Any]] = {
        "sandbox": lambda: open_sandbox(sandbox, f"{section}.sandbox", packages),
        "http": build_http,
    }
    return factories | {"url": lambda: url} if url else factories


def build_http() -> Http:
    """Return an HTTP client, imported only on use."""
    from spmd_rl.sidecar.http import HttpService

    return HttpService()
