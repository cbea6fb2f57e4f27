"""The parts of `make test`: each has a limit as a whole, and what failed in any of them is said at the very end.

python -m tests.parts run NAME ARGUMENTS...   runs one; the arguments are pytest's
python -m tests.parts sum NAMES...            says how they went; exit code 1 unless all did well
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from spmd_rl.base.process import adopt_orphans, kill_children
from tests.patience import patient

RESULTS = Path(os.environ.get("TEST_PARTS") or Path(__file__).parents[1] / "runs" / "tests")
LIMIT_SECONDS = 540.0 * (2 if len(os.sched_getaffinity(0)) == 1 else 1)
"""Longest time of a part, before `patient`. TEST_UNTIL, a point in time (seconds of the epoch), ends all parts."""


PROGRAMS = {"bwrap": "bubblewrap", "Chromium": "chromium", "shellcheck": "shellcheck"}
"""A word of the reason for a skip, and Debian's package of the program that it names"""


def run(name: str, arguments: list[str]) -> int:
    """Run a part; its exit code, 124 if the limit ended it. No process of it is left."""
    began, results = time.time(), RESULTS / name
    until = min(began + patient(LIMIT_SECONDS), float(os.environ.get("TEST_UNTIL", "inf")))
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("")
    adopt_orphans()
    command = [sys.executable, "-m", "pytest", *arguments]
    process = subprocess.Popen(command, env=os.environ | {"TEST_RESULTS": str(results)})
    try:
        while (code := _ended(process.pid)) is None and time.time() < until:
            time.sleep(0.1)
        if code is None:
            code, ended = 124, f"ended by the limit of a part after {(time.time() - began) / 60:.1f} min"
            print(f"\n{name}: {ended}", flush=True)
            _show_stacks(psutil.Process(process.pid))
        else:
            ended = f"exit code {code}"
    finally:
        kill_children()
    with open(results, "a") as file:
        file.write(f"ended\t{ended}\n")
    return code


def _ended(pid: int) -> int | None:
    """The exit code of this child, once it has one; reaps those of others, which are ours by adoption."""
    while (found := os.waitpid(-1, os.WNOHANG))[0]:
        if found[0] == pid:
            return os.waitstatus_to_exitcode(found[1])
    return None


def _show_stacks(process: psutil.Process) -> None:
    """Print the processes of a part, the stacks of those that can say them (ranks), and pytest's own, which ends it."""
    logs = {}
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            print(f"  pid {child.pid} ({child.status()}): {' '.join(child.cmdline())[:200]}", flush=True)
            caught = next(
                line for line in Path(f"/proc/{child.pid}/status").read_text().splitlines() if "SigCgt" in line
            )
            if int(caught.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1:
                logs[Path(f"/proc/{child.pid}/fd/2").readlink()] = child.pid
                child.send_signal(signal.SIGUSR2)
    time.sleep(1.0)
    for log in filter(Path.is_file, logs):
        print(f"--- {log}\n{log.read_text(errors='replace')[-8000:]}", flush=True)
    process.send_signal(signal.SIGABRT)  # pytest has faulthandler enabled
    deadline = time.monotonic() + 10.0
    while _ended(process.pid) is None and time.monotonic() < deadline:
        time.sleep(0.1)


def total(names: list[str]) -> int:
    """Print what failed in these parts, and how many tests did what, skipped ones by reason; 1 unless all is well."""
    counts, skipped = Counter[str](), Counter[str]()
    bad = []
    for name in names:
        path, failed, last, ended = RESULTS / name, [], "", "did not run"
        for line in path.read_text().splitlines() if path.exists() else ():
            kind, *words = line.split("\t")
            counts[kind] += 1
            if kind == "started":
                last = words[0]
            elif kind == "failed":
                failed.append(" ".join(words))
            elif kind == "skipped":
                skipped[words[1]] += 1
            elif kind == "ended":
                ended = words[0]
        if ended != "exit code 0" and not (ended == "exit code 1" and failed):
            failed.append(f"{ended}; its last test: {last or 'none'}")
        bad += [f"  {name}: {what}" for what in failed]
    if bad:
        print("\nWhat failed:", *bad, sep="\n")
    print(f"\n{counts['skipped']} skipped")
    for reason, count in skipped.most_common():
        print(f"  {count}: {reason}")
    wanting = {
        package: sum(count for reason, count in skipped.items() if word in reason) for word, package in PROGRAMS.items()
    }
    if wanting := {package: count for package, count in wanting.items() if count}:
        listed = ", ".join(f"{package} {count}" for package, count in wanting.items())
        print(f"skipped for want of a program: {listed}; apt-get install {' '.join(wanting)}")
    print(f"{counts['passed']} passed, {len(bad)} failed", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    sys.exit(run(words[0], words[1:]) if what == "run" else total(words))
