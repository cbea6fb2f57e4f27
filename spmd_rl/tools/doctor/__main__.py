"""Checks what works on this machine, or on the ranks of torchrun, and prints a cure for each failure.

Settings of a run (key=value) may follow: the doctor then checks that run's directory, ports, model size and sandboxes.
Exit code 0 if nothing failed, 1 if something did, 2 for an invalid setting.
"""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmd_rl.base.command_line import Parser, at_least, program
from spmd_rl.base.errors import UserError, printable, tell
from spmd_rl.base.waits import phase
from spmd_rl.config.load import load
from spmd_rl.config.ranks import local_rank, rank
from spmd_rl.config.schema import RlvrConfig
from spmd_rl.tools.doctor.checks import ALONE, CHECKS, Check, CheckOutcome, Failed
from spmd_rl.tools.doctor.ranks import Ranks
from spmd_rl.tools.doctor.runner import run_checks

STYLES = {"ok": "green", "failed": "bold red", "skipped": "yellow"}
SAME = "versions"
"""Check whose result must be the same on all nodes."""


def merge(by_rank: Mapping[int, Sequence[CheckOutcome]], hosts: Mapping[int, str]) -> list[CheckOutcome]:
    """Return one result a check: the most serious failure, with its rank, else the first rank's result.

    The seconds are those of the slowest rank.
    """
    order = ["ranks", *(check.name for check in CHECKS)]
    found = {result.name for results in by_rank.values() for result in results}
    merged = []
    for name in sorted(found, key=order.index):
        rows = [(rank, r) for rank, results in sorted(by_rank.items()) for r in results if r.name == name]
        failed = [(rank, r) for rank, r in rows if r.verdict == "failed"]
        # The closest to the cause, then the earliest: most other failures are consequences.
        rank, shown = max(failed, key=lambda row: (row[1].weight, -row[1].at)) if failed else rows[0]
        detail, verdict, cure = shown.detail, shown.verdict, shown.cure
        other = next(((q, r) for q, r in rows if name == SAME and r.detail != rows[0][1].detail), None)
        if not failed and other:
            detail = f"rank {other[0]} on {hosts.get(other[0])} has {other[1].detail}; rank {rows[0][0]} has {detail}"
            verdict, cure = "failed", "install the same versions on all nodes"
        elif failed and len(rows) > 1:
            where = f"rank {rank} on {hosts.get(rank)}" if len(failed) < len(rows) or shown.weight else "all ranks"
            detail = f"{where}: {detail}"
        merged.append(CheckOutcome(name, verdict, detail, cure, max(r.seconds for _, r in rows)))
    return merged


def show(results: Sequence[CheckOutcome]) -> None:
    """Print the table, and below it the number of failed checks."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    table = Table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("what was found, and the cure", overflow="fold")
    for result in results:
        text = Text(printable(result.detail))
        if result.cure:
            text.append(f"\ncure: {result.cure}", style="bold")
        table.add_row(result.name, Text(result.verdict, STYLES[result.verdict]), f"{result.seconds:.1f}", text)
    console.print(table)
    count = {verdict: sum(r.verdict == verdict for r in results) for verdict in STYLES}
    console.print(", ".join(f"{number} {verdict}" for verdict, number in count.items() if number))


ARRIVE_SECONDS = 40.0
ALONE_SECONDS = 120.0
"""Seconds until all ranks must have finished the checks that meet no other rank."""
LEAVE_SECONDS = 30.0
DIED = "look at what that rank printed above; out of memory: `dmesg`, fewer ranks a node"


class Terminated(Exception):
    """The signal to end this process, from torchrun or a person: another rank may have died."""


def main(arguments: Sequence[str]) -> int:
    """Run the command line on this rank, and return the exit code."""
    parser = Parser(program("doctor"), description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the run, as for spmd_rl.rlvr")
    seconds = {"type": at_least(0, float), "default": ARRIVE_SECONDS, "metavar": "SECONDS"}
    parser.add_argument("--wait", **seconds, help="for ranks to arrive (%(default)g)")
    parser.add_argument(
        "--only", default="", metavar="CHECK,...", help="the checks whose names begin so: --only devices,dtype,vllm"
    )
    asked = parser.parse_intermixed_args(arguments)
    try:
        cfg = load("rlvr", RlvrConfig, asked.settings)
    except UserError as error:
        if rank() == 0:
            tell(f"error: {error}")
        return 2
    if not (todo := chosen(asked.only)):
        parser.error(f"--only: no check begins with {asked.only}; there are {', '.join(c.name for c in CHECKS)}")
    signal.signal(signal.SIGTERM, _terminate)
    folder = Path(tempfile.mkdtemp(prefix="spmd-rl-doctor-"))
    try:
        failed = examine(cfg, folder, asked.wait, todo)
    except KeyboardInterrupt:
        return 130
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def chosen(beginnings: str) -> list[Check]:
    """Return the checks whose names begin with one of these, separated by commas; all for an empty string."""
    return [check for check in CHECKS if check.name.startswith(tuple(beginnings.split(",")))]


def examine(cfg: RlvrConfig, folder: Path, wait_seconds: float, todo: Sequence[Check]) -> bool:
    """Run checks and print the table on one rank. Return True if any failed, on any rank."""
    ranks, all_here, began = Ranks(rank()), True, time.perf_counter()
    try:
        with phase("waiting for the ranks"):
            ranks = Ranks.join(wait_seconds)
            arrival = CheckOutcome("ranks", "ok", ranks.arrive(wait_seconds))
    except Failed as failed:
        all_here, arrival = False, CheckOutcome("ranks", "failed", failed.detail, failed.cure)
    results = [replace(arrival, seconds=time.perf_counter() - began)]
    patience = LEAVE_SECONDS if all_here else 1.0
    try:
        for process in dict.fromkeys(check.process for check in todo):
            checks = [check for check in todo if check.process == process]
            with phase(f"checking {process}", ranks.reports):
                if process in ALONE:
                    if process != "node" or local_rank() == 0:
                        results += run_checks(checks, cfg, folder, Ranks(), results)
                    # Later checks meet the other ranks, and their limits must not include this wait.
                    ranks.gather(process, True, ALONE_SECONDS if all_here else 0.0)
                elif all_here:
                    results += run_checks(checks, cfg, folder, ranks, results)
                else:
                    results += [CheckOutcome(check.name, "skipped", "not all ranks are here") for check in checks]
    except Terminated:
        results[0] = CheckOutcome("ranks", "failed", "this process was asked to end (SIGTERM)", DIED)
        # The others end as well, and with them perhaps the store.
        ranks.size = 1
    everyone = ranks.gather("results", [asdict(result) for result in results], patience)
    by_rank = {rank: [CheckOutcome(**row) for row in rows] for rank, rows in enumerate(everyone) if rows}
    merged = merge(by_rank, ranks.hosts)
    failed = any(result.verdict == "failed" for result in merged)
    if ranks.reports:
        show(merged)
        if failed:
            print(f"logs: {folder}", flush=True)
    # The first rank may host the store, so it leaves last.
    ranks.gather("leave", True, patience)
    return failed


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
