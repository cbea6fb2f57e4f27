"""Shows the status of a sidecar's host, or serves a host as a worker node.

    python -m spmd_rl sidecar --status ADDRESS [--keys DIR] [--json]
    python -m spmd_rl sidecar --connect tcp://HOST:PORT --keys DIR --allow math=rewards.math_verify:MathReward

Local rank 0 of a node starts its host (see `launcher.py`) with one argument: the fd of a socket between them. The exit
code is 2 for a user's mistake.
"""

import argparse
import os
import signal
import socket
import sys

from spmd_rl import wire
from spmd_rl.command_line import Parser, at_least, program
from spmd_rl.curve_keys import ClientKeys, check_connect
from spmd_rl.errors import UserError, tell
from spmd_rl.process import die_with_parent
from spmd_rl.sandbox import SANDBOXES
from spmd_rl.sidecar.frames import receive_frame, send_frame
from spmd_rl.sidecar.host import Host
from spmd_rl.sidecar.status import fetch_status, to_json, to_table
from spmd_rl.sidecar.worker_node import AllowList, WorkerNode


def run_host(fd: int) -> None:
    """Run the host until the rank is gone or SIGTERM asks it to drain."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks
    with socket.socket(fileno=fd) as parent:
        start = receive_frame(parent, wire.TO_CHILD)
        if start is None:
            return
        if start.parent:
            die_with_parent(start.parent)
        try:
            host = Host(start, parent)
        except UserError as error:
            send_frame(parent, wire.StartFailed(str(error)))
            return
        signal.signal(signal.SIGTERM, lambda *_: host.drain())
        host.run()


def run_worker_node(options: argparse.Namespace) -> None:
    """Serve a host elsewhere until the run is over or a signal asks the node to drain."""
    if not options.keys or not options.allow:
        raise UserError("--connect: needs --keys DIR and --allow DOMAIN=MODULE:CLASS")
    check_connect("--connect", options.connect)
    allowed = AllowList(options.allow)
    workers = options.workers or max(1, len(os.sched_getaffinity(0)) // len(allowed.domains))
    # what can be imported here can be imported by the workers
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    node = WorkerNode(options.connect, ClientKeys.load(options.keys, "--keys"), allowed, workers, options.sandbox)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.drain())
    node.run()


def print_status(options: argparse.Namespace) -> None:
    """Print the status of a host."""
    status = fetch_status(options.status, ClientKeys.load(options.keys, "--keys") if options.keys else None)
    tell(to_json(status) if options.json else to_table(status), lines=True, file=sys.stdout)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options, of which one of `fd`, `status` and `connect` is set."""
    parser = Parser(program("sidecar"), description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("fd", nargs="?", type=int, help=argparse.SUPPRESS)
    what.add_argument("--status", metavar="ADDRESS", help="show the pools, workers and worker nodes of that host")
    what.add_argument("--connect", metavar="tcp://HOST:PORT", help="serve that host with this machine's processors")
    parser.add_argument("--keys", metavar="DIR", help="CURVE keys: client.secret and server.public")
    parser.add_argument("--json", action="store_true", help="with --status: one JSON object")
    targets = "DOMAIN=MODULE:CLASS[,MODULE:CLASS...]"
    parser.add_argument("--allow", metavar=targets, action="append", help="classes that the host may have imported")
    parser.add_argument(
        "--workers", type=at_least(1), metavar="N", help="per domain; default: a share of the processors"
    )
    parser.add_argument("--sandbox", choices=("auto", *SANDBOXES), default="auto", help="of this machine")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    try:
        options = parse(argv)
        if options.fd is not None:
            run_host(options.fd)
        elif options.status:
            print_status(options)
        else:
            run_worker_node(options)
    except UserError as error:
        tell(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
