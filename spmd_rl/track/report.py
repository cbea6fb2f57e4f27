"""Draw a run's `report.html` again, from what lies in its directory.

python -m spmd_rl.track.report RUN_DIR
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from spmd_rl.track.render import write


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit code."""
    if len(arguments) != 1:
        print("usage: python -m spmd_rl.track.report RUN_DIR", file=sys.stderr)
        return 2
    try:
        print(write(Path(arguments[0])))
    except OSError as error:
        print(f"{arguments[0]}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
