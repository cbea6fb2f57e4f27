"""Read-only status of a running host: pools, workers, queues, verdicts and deaths.

python -m spmd_rl sidecar --status tcp://10.0.0.1:5555 --keys DIR
python -m spmd_rl sidecar --status ipc:///tmp/spmd-rl-.../host --json
"""

from collections.abc import Mapping

import msgspec
import zmq
from msgspec.structs import asdict

from spmd_rl.base.curve_keys import ClientKeys
from spmd_rl.base.errors import UserError, aligned
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.sockets import open_dealer

REPLY_SECONDS = 5.0


def fetch_status(address: str, keys: ClientKeys | None, seconds: float = REPLY_SECONDS) -> wire.HostStatus:
    """Request a host's status. UserError if it does not answer within `seconds`."""
    context = zmq.Context()
    try:
        dealer = open_dealer(context, address, keys)
        for limit in (zmq.SNDTIMEO, zmq.RCVTIMEO):
            dealer.setsockopt(limit, int(seconds * 1000))
        dealer.send(wire.encode(wire.GetStatus()))
        reply = wire.TO_STATUS.decode(dealer.recv())
    except zmq.Again:
        why = "nothing listens there, or it " + ("needs keys" if keys is None else "does not list this key")
        raise UserError(f"--status: no answer from {address} within {seconds:g} s: {why}") from None
    except (zmq.ZMQError, wire.WireError) as error:
        raise UserError(f"--status: {address}: {error}") from None
    finally:
        context.destroy(linger=0)
    if isinstance(reply, wire.Error):
        raise UserError(f"--status: {address}: {reply.detail}")
    return reply


def to_json(status: wire.HostStatus) -> str:
    """Format a status as JSON with the fields of `wire.HostStatus`."""
    pools = {name: asdict(pool) for name, pool in status.pools.items()}
    envs = {tag: asdict(pool) for tag, pool in status.envs.items()}
    return msgspec.json.encode(asdict(status) | {"pools": pools, "envs": envs}).decode()


def to_table(status: wire.HostStatus) -> str:
    """Format a status for a terminal: the host and its pools."""
    state = "draining" if status.draining else "serving"
    lines = [
        f"host {status.pid}: {state}, up {status.uptime_seconds:.0f} s",
        f"{status.in_flight} requests of {status.clients} clients in flight; "
        f"{status.refused_keys} connections refused for their key",
    ]
    tables = [(("domain", "workers", "running", "queued", "verdicts", "deaths", "target"), status.pools)]
    if status.envs:
        tables.append((("environment", "workers", "sessions", "queued", "replies", "deaths", "target"), status.envs))
    return "\n\n".join(["\n".join(lines), *(_pools(*one) for one in tables)])


def _pools(titles: tuple[str, ...], pools: Mapping[str, wire.PoolStatus]) -> str:
    rows = [titles]
    for name, pool in pools.items():
        counts = (f"{pool.ready}/{pool.workers}", pool.running, pool.queued, pool.verdicts, pool.deaths)
        rows.append((name, *map(str, counts), pool.broken or pool.target))
    return aligned(rows, right=range(1, len(titles) - 1))
