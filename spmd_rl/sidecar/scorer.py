"""The way to a scorer: settings are checked, the node's host is started or joined, or no sidecar is used at all."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spmd_rl import wire
from spmd_rl.errors import UserError
from spmd_rl.sidecar.client import Client
from spmd_rl.sidecar.direct import Direct
from spmd_rl.sidecar.launcher import HostProcess
from spmd_rl.types import Node

if TYPE_CHECKING:
    from spmd_rl.config.schema import RewardsConfig

MAX_PATH_BYTES = 107
"""What the kernel allows for the path of a socket."""


@contextmanager
def connect(rewards: "RewardsConfig", node: Node, bind: str = "ipc", debug: bool = False) -> Iterator[Client | Direct]:
    """A `Scorer` for this rank. Local rank 0 starts the node's host and waits until it is ready; the others join.

    `bind`: `ipc` listens at `node.address`; `tcp://127.0.0.1:PORT` on a loopback port. `debug`: no sidecar, rewards run
    in this process. UserError, in one line, for a rewarder that cannot be built and an address that is not private.
    Call it from the main thread: the host lives as long as the thread that started it.
    """
    if debug:
        yield Direct(rewards)
        return
    address = check_address(node.address if bind == "ipc" else bind)
    host = HostProcess(address, rewards) if node.local_rank == 0 else None
    if host is not None:
        host.wait_ready()
    timeouts = {domain: min(reward.timeout, wire.MAX_TIMEOUT) for domain, reward in rewards.domains.items()}
    client = Client(address, timeouts, host)
    try:
        yield client
    finally:
        client.close()


def check_domains(prompts_domains: Iterable[str], rewards: "RewardsConfig") -> None:
    """UserError if a prompt's domain has no rewarder."""
    if unknown := sorted(set(prompts_domains) - set(rewards.domains)):
        known = ", ".join(sorted(rewards.domains)) or "none"
        raise UserError(f"no reward.{unknown[0]}.target is set, but prompts have domain {unknown[0]!r} (set: {known})")


def check_address(address: str) -> str:
    """The address, if only processes of this machine can reach it; else UserError."""
    if address.startswith("ipc:///"):
        if len(address.removeprefix("ipc://").encode()) > MAX_PATH_BYTES:
            raise UserError(f"the sidecar's address {address} is longer than a socket's path may be ({MAX_PATH_BYTES})")
        return address
    if match := re.fullmatch(r"tcp://(127\.0\.0\.1|\[::1\])(:\d{1,5})?", address):
        if match[2] is None:
            raise UserError(f"sidecar.bind={address} needs a port: {address}:5555")
        return address
    raise UserError(
        f"sidecar.bind={address}: only `ipc` and `tcp://127.0.0.1:PORT` are served; beyond this machine a sidecar "
        "would need CURVE keys and an allow-list, which this version does not have"
    )
