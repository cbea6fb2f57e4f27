"""Command line of a sidecar: print a host's status, or run a host on a machine without ranks.

    python -m spmd_rl sidecar --status ADDRESS [--keys DIR] [--json]
    python -m spmd_rl sidecar --bind tcp://*:5555 --keys DIR rlvr reward.math.target=rewards.math_verify:MathReward

Local rank 0 of a node starts its host (see `launcher.py`) with one argument: the fd of a socket between them.
"""

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence

from spmd_rl.base.command_line import Parser, program
from spmd_rl.base.curve_keys import ClientKeys, check_bind
from spmd_rl.base.errors import UserError, tell
from spmd_rl.base.process import die_with_parent
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.frames import receive_frame, send_frame
from spmd_rl.sidecar.host import Host
from spmd_rl.sidecar.launcher import start_message
from spmd_rl.sidecar.status import fetch_status, to_json, to_table


def run_host(fd: int) -> None:
    """Run the host until the rank is gone, or drain on SIGTERM."""
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


def serve(options: argparse.Namespace) -> None:
    """Run a host until SIGTERM or Ctrl-C drains it."""
    check_bind(options.bind, keyed=bool(options.keys))
    # What can be imported here can be imported by the workers.
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    start = build_start(options.bind, options.keys or "", options.words, options.config_dir, options.config_name)
    host = Host(start, None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.drain())
    host.run()


def build_start(
    bind: str, keys: str, words: Sequence[str], config_dir: str | None, config_name: str | None
) -> wire.StartHost:
    """Return a host's message of the run's sections `reward` and `env`, without servers."""
    # Imported here: a host that a rank starts does not need Hydra, whose import is slow.
    from spmd_rl.config.load import load_host

    pipeline = words[0].removeprefix("spmd_rl.") if words else ""
    if not pipeline or "=" in pipeline:
        raise UserError("--bind: needs the run's pipeline and its settings: rlvr reward.math.target=module:Class ...")
    cfg = load_host(pipeline, words[1:], config_dir, config_name)
    for domain in [name for name, reward in cfg.reward.domains.items() if reward.devices is not None]:
        tell(f"sidecar: reward.{domain} has a server, which only the hosts of ranks start; it is not served here")
        del cfg.reward.domains[domain]
    if not cfg.reward.domains and not cfg.env.tags:
        raise UserError("--bind: the settings name no reward.<domain>.target and no env.<tag>.target to serve")
    return start_message(bind, cfg.reward, cfg.env, keys)


def print_status(options: argparse.Namespace) -> None:
    """Print the status of a host."""
    status = fetch_status(options.status, ClientKeys.load(options.keys, "--keys") if options.keys else None)
    tell(to_json(status) if options.json else to_table(status), lines=True, file=sys.stdout)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options. Without `status` and `bind`, the word is the fd of a rank's socket."""
    parser = Parser(program("sidecar"), description=__doc__.partition("\n")[0])
    parser.add_argument(
        "words", nargs="*", metavar="PIPELINE [key=value ...]", help="with --bind: the pipeline and settings of the run"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", metavar="ADDRESS", help="show the pools and workers of that host")
    what.add_argument("--bind", metavar="tcp://ADDRESS:PORT", help="serve rewards and environments there")
    parser.add_argument("--keys", metavar="DIR", help="CURVE keys (python -m spmd_rl sidecar_keys DIR)")
    parser.add_argument("--json", action="store_true", help="with --status: one JSON object")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="with --bind: as in the run's command")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="with --bind: as in the run's command")
    options = parser.parse_intermixed_args(argv)
    if not (options.status or options.bind or [word for word in options.words if word.isdecimal()]):
        parser.error("one of --status and --bind is required")
    return options


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    try:
        options = parse(argv)
        if options.status:
            print_status(options)
        elif options.bind:
            serve(options)
        else:
            run_host(int(options.words[0]))
    except UserError as error:
        tell(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
