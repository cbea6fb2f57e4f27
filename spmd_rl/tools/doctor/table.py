"""The results of all ranks as one table."""

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmd_rl.base.errors import printable
from spmd_rl.tools.doctor.checks import CHECKS, CheckOutcome

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
