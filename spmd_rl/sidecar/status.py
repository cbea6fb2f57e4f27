"""A look at a running host: its pools, workers, queues, verdicts, deaths and attached nodes. Changes nothing.

python -m spmd_rl.sidecar --status tcp://10.0.0.1:5555 --keys DIR
python -m spmd_rl.sidecar --status ipc:///tmp/spmd-rl-.../host --json
"""

import msgspec
import zmq

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys, bound
from spmd_rl.errors import UserError

ANSWER_SECONDS = 5.0


def ask(address: str, keys: ClientKeys | None, seconds: float = ANSWER_SECONDS) -> wire.Report:
    """The report of the host at `address`. UserError if there is none within `seconds`."""
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        dealer.setsockopt(zmq.RCVTIMEO, int(seconds * 1000))
        bound(dealer, address)
        if keys is not None:
            keys.secure(dealer)
        dealer.connect(address)
        dealer.send(wire.encode(wire.Ask()))
        reply = wire.TO_ASKER.decode(dealer.recv())
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


def to_json(report: wire.Report) -> str:
    """One JSON object, with the names of `wire.Report`."""
    pools = {name: _fields(pool) for name, pool in report.pools.items()}
    nodes = [_fields(node) for node in report.nodes]
    return msgspec.json.encode(_fields(report) | {"pools": pools, "nodes": nodes}).decode()


def to_table(report: wire.Report) -> str:
    """For a terminal: the host, its pools, its nodes."""
    state = "draining" if report.draining else "serving"
    lines = [
        f"host {report.host}, pid {report.pid}: {state}, up {report.uptime_seconds:.0f} s",
        f"{report.under_way} questions of {report.clients} clients under way, {report.held_bytes / 1e6:.1f} MB; "
        f"{report.refused_keys} connections with other keys refused",
        "",
    ]
    rows = [("domain", "workers", "running", "queued", "verdicts", "deaths", "target")]
    for name, pool in report.pools.items():
        counts = (f"{pool.ready}/{pool.workers}", pool.running, pool.queued, pool.verdicts, pool.deaths)
        rows.append((name, *counts, pool.broken or pool.target))
    lines += _aligned(rows)
    if report.nodes:
        rows = [("node", "window", "running", "verdicts", "silent s", "", "domains")]
        for node in report.nodes:
            counts = (sum(node.windows.values()), node.running, node.verdicts, f"{node.silent_seconds:.1f}", "")
            rows.append((node.name, *counts, ", ".join(node.windows)))
        lines += ["", *_aligned(rows)]
    return "\n".join(lines)


def _aligned(rows: list[tuple]) -> list[str]:
    """First and last column to the left, numbers to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]


def _fields(struct: msgspec.Struct) -> dict:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
