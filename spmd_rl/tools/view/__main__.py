"""Shows a run as a page in the browser, or its samples on the terminal with `--text`."""

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from spmd_rl.base.command_line import Parser, at_least, program
from spmd_rl.base.errors import UserError, one_line, tell
from spmd_rl.tools.view import terminal
from spmd_rl.tools.view.runs import RunIndex
from spmd_rl.tools.view.server import ViewServer
from spmd_rl.track.samples import KINDS


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        program("view"),
        description="Shows a run as a page of this machine alone, or its samples as text on the terminal.",
        epilog="On another machine: ssh -L 8800:127.0.0.1:8800 HOST, there with --port 8800 --no-browser.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="a run directory, or a folder of them")
    made.add_argument("--port", type=at_least(0), default=0, help="of the page; default: any free one")
    made.add_argument("--metrics", action="store_true", help="serve the last metrics at /metrics, as OpenMetrics")
    made.add_argument("--no-browser", action="store_true", help="print the address alone")
    text = made.add_argument_group("on the terminal")
    text.add_argument("--text", action="store_true", help="print steps, the samples of a step, or one of them")
    text.add_argument("--step", type=at_least(0), metavar="N", help="its samples; with --sample, default: the last")
    text.add_argument("--sample", metavar="TICKET.ANSWER", help="one trajectory; TICKET alone: its whole group")
    text.add_argument("--held-out", action="store_true", help="held-out answers in place of training samples")
    text.add_argument("--color", choices=terminal.COLORS, default="logprob", help="what colours the tokens tell")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    asked = parser().parse_args(arguments)
    try:
        runs = RunIndex(asked.run)
        if asked.text or asked.sample is not None or asked.step is not None:
            place = terminal.Selection(KINDS[asked.held_out], asked.step, asked.sample, asked.color)
            terminal.show(runs, place)
            return 0
        return serve(runs, asked.port, asked.metrics, asked.no_browser)
    except (OSError, UserError, ValueError, msgspec.MsgspecError, yaml.YAMLError) as error:
        tell(f"error: {error if isinstance(error, UserError) else one_line(error)}")
        return 2


def serve(runs: RunIndex, port: int, metrics: bool, no_browser: bool) -> int:
    """Serve the page until Ctrl-C. UserError if the port is unavailable."""
    try:
        server = ViewServer(runs, port, metrics)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port}: {getattr(error, 'strerror', None) or error}") from None
    with server:
        print(f"{server.url}   (Ctrl-C ends it)", flush=True)
        if not no_browser and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
