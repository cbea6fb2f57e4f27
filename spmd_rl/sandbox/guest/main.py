"""The entry point of a confined process: it reads the job, then becomes the program, the tested code or its tests.

Descriptors after the program's 0, 1 and 2: `job`, JSON to read; `report`, which gets one byte when the process is
ready, then the report of the tests; `rpc`, a socket between tested code and its tests.

Mode `run` executes the job's code as `__main__`, `serve` as the module `solution`, which the tests call. Mode `test`
has the tests alone. In mode `beside` code and tests share the process, so the report proves nothing.
"""

import builtins
import json
import os
import resource
import sys

from spmd_rl.sandbox.guest import program, serve, testing

# the time to make a text of a number grows with the square of its length
MAX_DIGITS = 100_000
THREADS = 64  # of a program that may not fork


def main(job, report, rpc):
    """Do the job and end the process; arguments are descriptors."""
    with open(job, "rb") as file:
        job = json.load(file)
    set_limits(job["limits"])
    builtins.exit = builtins.quit = sys.exit
    try:
        os.getcwd()
    except OSError:
        # the directory has been removed: there are no files
        os.getcwd = lambda: "/"
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(MAX_DIGITS if job["mode"] == "test" else 0)
    os.write(report, b"r")
    if job["mode"] in ("test", "beside"):
        found = testing.test(job, rpc)
        with open(report, "wb") as file:
            file.write(found)
        os._exit(0)
    os.close(report)
    if job["mode"] == "run":
        program.run(job)
    serve.serve(job, rpc)
    os._exit(0)


def set_limits(limits):
    """Set limits that cannot be raised again. `processes` 0 leaves the user's limit."""
    processes = THREADS if limits["processes"] == 1 else limits["processes"]
    for name, soft, hard in [
        ("CPU", limits["cpu"], limits["cpu"] + 1),
        ("AS", limits["memory"], limits["memory"]),
        ("FSIZE", limits["disk"], limits["disk"]),
        ("NPROC", processes, processes),
        ("NOFILE", 64, 64),
        ("CORE", 0, 0),
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
    ]:
        if soft or name != "NPROC":
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))
