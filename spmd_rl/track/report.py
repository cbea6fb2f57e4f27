"""Writes the `report.html` of a run again, from the files in its directory.

python -m spmd_rl.track.report RUN_DIR
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from spmd_rl.track.render import write_report


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m spmd_rl.track.report RUN_DIR", file=sys.stderr)
        return 2
    try:
        print(write_report(Path(arguments[0])))
    except OSError as error:
        print(f"{arguments[0]}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
