"""The way to a scorer: settings are checked, the node's host is started or joined, or no sidecar is used at all."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys, check_bind, from_here
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
def connect(
    rewards: "RewardsConfig", node: Node, bind: str = "ipc", debug: bool = False, keys: str | None = None
) -> Iterator[Client | Direct]:
    """A `Scorer` for this rank. Local rank 0 starts the node's host and waits until it is ready; the others join.

    `bind`: `ipc` listens at `node.address`, else `tcp://ADDRESS:PORT`. `keys`: a directory of CURVE keys; without it
    only this machine is served. `debug`: no sidecar, rewards run in this process. UserError, in one line, for a
    rewarder that cannot be built, an address that is not private and keys that are none. Call it from the main thread:
    the host lives as long as the thread that started it.
    """
    if debug:
        yield Direct(rewards)
        return
    address = check_address(node.address if bind == "ipc" else bind, keyed=keys is not None)
    proof = ClientKeys.load(keys) if keys is not None else None
    host = HostProcess(address, rewards, keys or "") if node.local_rank == 0 else None
    if host is not None:
        host.wait_ready()
    timeouts = {domain: min(reward.timeout, wire.MAX_TIMEOUT) for domain, reward in rewards.domains.items()}
    client = Client(from_here(address), timeouts, host, proof)
    try:
        yield client
    finally:
        client.close()


def check_domains(prompts_domains: Iterable[str], rewards: "RewardsConfig") -> None:
    """UserError if a prompt's domain has no rewarder."""
    if unknown := sorted(set(prompts_domains) - set(rewards.domains)):
        known = ", ".join(sorted(rewards.domains)) or "none"
        raise UserError(f"no reward.{unknown[0]}.target is set, but prompts have domain {unknown[0]!r} (set: {known})")


def check_address(address: str, keyed: bool = False) -> str:
    """The address, if only processes of this machine, or with keys (`keyed`) their holders, can reach it; else
    UserError."""
    if not address.startswith("ipc:///"):
        try:
            check_bind(address, keyed)
        except UserError as error:
            raise UserError(f"sidecar.{error}") from None
    elif len(address.removeprefix("ipc://").encode()) > MAX_PATH_BYTES:
        raise UserError(f"the sidecar's address {address} is longer than a socket's path may be ({MAX_PATH_BYTES})")
    return address
