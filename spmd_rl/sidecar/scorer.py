"""Connection of a rank to its node's sidecar."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from spmd_rl.base.curve_keys import ClientKeys, check_bind, local_address
from spmd_rl.base.errors import UserError
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.clients import RemoteEnvironments, ScoreClient
from spmd_rl.sidecar.launcher import HostProcess, env_pool_spec, pool_spec
from spmd_rl.sidecar.local import LocalEnvironments, LocalScorer
from spmd_rl.sidecar.process_pool import spec_digest
from spmd_rl.types import Node

if TYPE_CHECKING:
    from spmd_rl.config.schema import EnvsConfig, RewardsConfig

BUNDLED = {
    "math": "rewards.math_verify:MathReward",
    "code": "rewards.code:CodeReward",
    "ifeval": "rewards.ifeval:IfevalReward",
}
"""Rewarders of domains that data sets name."""
MAX_PATH_BYTES = 107


@contextmanager
def connect(
    rewards: "RewardsConfig", node: Node, bind: str = "ipc", debug: bool = False, keys: str | None = None
) -> Iterator[ScoreClient | LocalScorer]:
    """Yield a `Scorer` for this rank; see `connect_both`."""
    with connect_both(rewards, None, node, bind, debug, keys) as (scorer, _):
        yield scorer


@contextmanager
def connect_environments(
    envs: "EnvsConfig", node: Node, bind: str = "ipc", debug: bool = False, keys: str | None = None
) -> Iterator[RemoteEnvironments | LocalEnvironments]:
    """Yield `Environments` for this rank; see `connect_both`."""
    with connect_both(None, envs, node, bind, debug, keys) as (_, environments):
        yield environments


@contextmanager
def connect_both(
    rewards: "RewardsConfig | None",
    envs: "EnvsConfig | None",
    node: Node,
    bind: str = "ipc",
    debug: bool = False,
    keys: str | None = None,
    hosts: Sequence[str] = (),
) -> Iterator[tuple[ScoreClient | LocalScorer, RemoteEnvironments | LocalEnvironments]]:
    """Yield a `Scorer` and `Environments` of the same hosts; without settings, one without domains or tags.

    Local rank 0 starts the node's host and waits until it is ready; the others join.

    bind: `ipc`, which listens at `node.address`, or `tcp://ADDRESS:PORT`. keys: directory of CURVE keys; without it
    only this machine is served. hosts: addresses of further ones. debug: run everything in this process.

    UserError for a rewarder or environment that cannot be built, an address that is not private, or malformed keys.
    """
    if debug:
        with closing(LocalEnvironments(envs)) as environments:
            yield LocalScorer(rewards), environments
        return
    address = check_address(node.address if bind == "ipc" else bind, keyed=keys is not None)
    client_keys = ClientKeys.load(keys) if keys is not None else None
    domains, tags = (rewards.domains if rewards else {}), (envs.tags if envs else {})
    # Called in the main thread: the host lives as long as the thread that started it.
    with ExitStack() as stack:
        host = None
        if node.local_rank == 0:
            host = HostProcess(address, rewards, keys or "", envs)
            host.wait_ready()
            stack.callback(host.stop)
        addresses = [local_address(address), *hosts]
        # Without settings these know no domain and no tag.
        scorer, environments = LocalScorer(None), LocalEnvironments(None)
        if rewards is not None:
            timeouts = {domain: min(reward.timeout, wire.MAX_TIMEOUT) for domain, reward in domains.items()}
            specs = {domain: spec_digest(pool_spec(reward)) for domain, reward in domains.items()}
            scorer = stack.enter_context(closing(ScoreClient(addresses, timeouts, specs, host, client_keys)))
        if envs is not None:
            limits = {tag: env.episode_timeout for tag, env in tags.items()}
            specs = {f"env.{tag}": spec_digest(env_pool_spec(env)) for tag, env in tags.items()}
            environments = stack.enter_context(closing(RemoteEnvironments(addresses, limits, specs, host, client_keys)))
        yield scorer, environments


def check_domains(prompts_domains: Iterable[str], rewards: "RewardsConfig") -> None:
    """Raise UserError if a prompt's domain has no rewarder."""
    if unknown := sorted(set(prompts_domains) - set(rewards.domains)):
        first, known = unknown[0], ", ".join(sorted(rewards.domains)) or "none"
        hint = f"; reward.{first}.target={BUNDLED[first]} is there for it" if first in BUNDLED else ""
        raise UserError(f"no reward.{first}.target is set, but prompts have domain {first!r} (set: {known}){hint}")


def check_address(address: str, keyed: bool = False) -> str:
    """Return an address that only this machine, or with `keyed` holders of keys, can reach; else UserError."""
    if not address.startswith("ipc:///"):
        try:
            check_bind(address, keyed)
        except UserError as error:
            raise UserError(f"sidecar.{error}") from None
    elif len(address.removeprefix("ipc://").encode()) > MAX_PATH_BYTES:
        raise UserError(f"the sidecar's address {address} is longer than a socket's path may be ({MAX_PATH_BYTES})")
    return address
