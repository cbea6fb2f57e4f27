"""Sidecars from a shell: a look at a host, and a CPU-only node that attaches to one.

    python -m spmd_rl.sidecar --status ADDRESS [--keys DIR] [--json]
    python -m spmd_rl.sidecar --connect tcp://HOST:PORT --keys DIR --allow math=rewards.math_verify:MathReward

Local rank 0 of a node starts its host (see `launcher.py`) with one bare argument: the fd of a socket between them.
Leaves out what a host or a node does. Exit code 2 for a user's mistake.
"""

import argparse
import os
import signal
import socket
import sys
from typing import NoReturn

from spmd_rl import wire
from spmd_rl.curve_keys import ClientKeys
from spmd_rl.errors import UserError
from spmd_rl.process import die_with_parent
from spmd_rl.sandbox import SANDBOXES
from spmd_rl.sidecar.attach import Allowed, Attached
from spmd_rl.sidecar.channel import receive, send
from spmd_rl.sidecar.host import Host
from spmd_rl.sidecar.status import ask, to_json, to_table


def be_host(fd: int) -> None:
    """Be the host until the rank is gone, or SIGTERM asks us to end in good order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks
    with socket.socket(fileno=fd) as parent:
        start = receive(parent, wire.STARTING_HOST)
        if start is None:
            return
        if start.parent:
            die_with_parent(start.parent)
        try:
            host = Host(start, parent)
        except UserError as error:
            send(parent, wire.Failed(str(error)))
            return
        signal.signal(signal.SIGTERM, lambda *_: host.drain())
        host.run()


def attach(asked: argparse.Namespace) -> None:
    """Serve a host elsewhere until the run is over, or a signal asks us to end."""
    if not asked.keys or not asked.allow:
        raise UserError("--connect: needs --keys DIR and --allow DOMAIN=MODULE:CLASS")
    if asked.workers is not None and asked.workers < 1:
        raise UserError(f"--workers: must be at least 1, not {asked.workers}")
    allowed = Allowed(asked.allow)
    workers = asked.workers or max(1, len(os.sched_getaffinity(0)) // len(allowed.domains))
    # what can be imported here can be imported by the workers
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    node = Attached(asked.connect, ClientKeys.load(asked.keys, "--keys"), allowed, workers, asked.sandbox)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.drain())
    node.run()


def show(asked: argparse.Namespace) -> None:
    """Print how a host is."""
    report = ask(asked.status, ClientKeys.load(asked.keys, "--keys") if asked.keys else None)
    print(to_json(report) if asked.json else to_table(report))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(argv: list[str]) -> argparse.Namespace:
    """One of `fd`, `status` and `connect` is set. UserError for a line that cannot be."""
    parser = _Parser("python -m spmd_rl.sidecar", description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("fd", nargs="?", type=int, help=argparse.SUPPRESS)
    what.add_argument("--status", metavar="ADDRESS", help="show the pools, workers and nodes of the host there")
    what.add_argument("--connect", metavar="tcp://HOST:PORT", help="attach this node's processors to the host there")
    parser.add_argument("--keys", metavar="DIR", help="CURVE keys: client.secret and server.public")
    parser.add_argument("--json", action="store_true", help="with --status: one JSON object")
    targets = "DOMAIN=MODULE:CLASS[,MODULE:CLASS...]"
    parser.add_argument("--allow", metavar=targets, action="append", help="what the host may have imported here")
    parser.add_argument("--workers", type=int, metavar="N", help="for each domain; default: a share of the processors")
    parser.add_argument("--sandbox", choices=("auto", *SANDBOXES), default="auto", help="of this node")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """The command line."""
    try:
        asked = parse(argv)
        if asked.fd is not None:
            be_host(asked.fd)
        elif asked.status:
            show(asked)
        else:
            attach(asked)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
