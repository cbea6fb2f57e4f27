"""The door before it loads torch, many times in one process: JSON lists of arguments in, what came of each out.

    echo '[["steps=many"], ["--help"]]' | python tests/e2e/told_at_once.py

Of each list: its exit code, the lines it printed, and whether torch was imported. A line that is no mistake would start
a run here, whose end would be this process's.
"""

import contextlib
import io
import json
import sys

from spmd_rl import rlvr
from spmd_rl.config import RlvrConfig, main


def outcome(arguments: list[str]) -> dict:
    """What one line at the prompt leads to."""
    printed, code = io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main("rlvr", RlvrConfig, rlvr.run, arguments)
        except SystemExit as end:
            code = end.code
    return {"code": code, "printed": printed.getvalue().splitlines(), "torch": "torch" in sys.modules}


if __name__ == "__main__":
    print(json.dumps([outcome(arguments) for arguments in json.load(sys.stdin)]))
