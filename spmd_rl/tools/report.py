"""Writes the `report.html` of a run again, from the files in its directory.

python -m spmd_rl report RUN_DIR [--steps 3 7 12]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from spmd_rl.base.command_line import Parser, at_least, program
from spmd_rl.base.errors import reason, tell
from spmd_rl.track.report import write_report


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(program("report"), description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--steps", type=at_least(0), nargs="+", metavar="N", help="show the samples of these steps")
    asked = parser.parse_args(arguments)
    try:
        print(write_report(asked.run, asked.steps))
    except (OSError, ValueError) as error:
        tell(f"error: {reason(error)}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
