"""Compares runs: curves by run name on one page, seeds of the same settings as a band, and a table on the terminal.

    python -m spmd_rl compare runs/rlvr/a runs/rlvr/b runs/rlvr/c
    python -m spmd_rl compare runs/rlvr/* --keys val/math/score/mean actor/entropy --out compare.html

The page needs no network, and has each run's overview. Runs that differ only in the seed are drawn as their mean, in a
band from minimum to maximum that ends with the shortest.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmd_rl.base.command_line import Parser, program
from spmd_rl.base.errors import plural, printable, reason, tell
from spmd_rl.config.run_identity import CONFIG_FILE, identity
from spmd_rl.track.metrics import COLUMNS
from spmd_rl.track.page_data import outline, overview, summary
from spmd_rl.track.report import page
from spmd_rl.track.run_reader import Point, RunData, read_run

SEEDS = ("seed", "data.seed")
TABLE_KEYS = tuple(key for _, key, _ in COLUMNS if "score" in key or "loss" in key)
LESS_IS_BETTER = ("loss", "diff", "time/", "seconds", "bubble", "overhead", "kl")
MAX_DIFFERING = 16
DIFFERENCE = "settings that differ"


@dataclass(frozen=True, slots=True)
class Lane:
    """One line of each chart: a run, or seeds of equal settings."""

    name: str
    runs: Sequence[RunData]

    def points(self, key: str) -> tuple[list[Point], list[Point], list[Point]]:
        """Return a metric's mean, minimum and maximum at steps that all runs have."""
        by_run = [dict(run.series(key)) for run in self.runs]
        # A mean over fewer seeds at later steps would jump where a run ends.
        steps = sorted(set.intersection(*map(set, by_run)))
        values = [[run[step] for run in by_run] for step in steps]
        mean, low, high = ([(s, of(v)) for s, v in zip(steps, values, strict=True)] for of in (fmean, min, max))
        return mean, low, high


def lanes(runs: Sequence[RunData]) -> list[Lane]:
    """Group runs that differ only in the seed, with distinct names.

    A second run with the same seed begins another lane.
    """
    together: dict[tuple[str, int], list[RunData]] = {}
    seen = Counter[str]()
    for run in runs:
        settings = json.dumps(_settings(run), sort_keys=True, default=str)
        start = f"{settings} {[run.setting(key) for key in SEEDS]}"
        together.setdefault((settings, seen[start]), []).append(run)
        seen[start] += 1
    groups = list(together.values())
    named = [_name(group) for group in groups]
    twice = {name for name in named if named.count(name) > 1}
    return [
        Lane(f"{name} ({group[0].directory})" if name in twice else name, group)
        for name, group in zip(named, groups, strict=True)
    ]


def _settings(run: RunData) -> dict[str, Any]:
    """Return settings that change samples or gradients, without seeds; a changed one with all its values."""
    found = {key: value for key, value in identity(run.settings).items() if key not in SEEDS}
    before: dict[str, str] = {}
    for until in run.about.get("until", ()):
        for key, value in until["settings"].items():
            before[key] = before.get(key, "") + f"{value} to step {until['step']}, then "
    return found | {key: f"{text}{found.get(key)}" for key, text in before.items()}


def _name(group: Sequence[RunData]) -> str:
    names = [str(run.setting("run.name") or run.directory.name) for run in group]
    if len(group) == 1:
        return names[0]
    common = os.path.commonprefix(names).rstrip("-_. ")  # noqa: RUF071  of the names' characters
    return f"{common or names[0]} ({len(group)} seeds)"


def differences(found: Sequence[Lane]) -> list[str]:
    """Return the settings in which lanes differ, by lane, as `policy.lr=1e-05`."""
    pipelines = [lane.runs[0].about.get("pipeline") for lane in found]
    settings = [_settings(lane.runs[0]) for lane in found]
    keys = sorted(set().union(*settings))
    # Pipelines have different settings, of which only the common ones can be compared.
    if len(set(pipelines)) > 1:
        settings = [{"pipeline": name, **tree} for name, tree in zip(pipelines, settings, strict=True)]
        keys = ["pipeline", *(key for key in keys if all(key in tree for tree in settings))]
    differing = [key for key in keys if len({str(tree.get(key)) for tree in settings}) > 1]
    more = f", and {len(differing) - MAX_DIFFERING} more" if len(differing) > MAX_DIFFERING else ""
    some = differing[:MAX_DIFFERING]
    return [printable(", ".join(f"{key}={tree.get(key)}" for key in some) + more, lines=False) for tree in settings]


def comparison(found: Mapping[str, RunData], keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return the page's reply `compare`: lanes of runs by name, and a table.

    keys: metrics to draw; by default the page chooses.
    """
    names = {id(run): name for name, run in found.items()}
    some = lanes(list(found.values()))
    columns, rows = values(some, keys)
    # A page scrolls to the right, so the settings come before the numbers.
    return {
        "title": f"{plural(len(some), 'run')} compared",
        "lanes": [{"name": lane.name, "runs": [names[id(run)] for run in lane.runs]} for lane in some],
        "keys": keys,
        "columns": [columns[0], DIFFERENCE, *(name.strip() for name in columns[1:])],
        "rows": [[row[0], settings, *row[1:]] for row, settings in zip(rows, differences(some), strict=True)],
    }


def page_of_all(found: Mapping[str, RunData], keys: Sequence[str]) -> str:
    """Return the page with all runs' data: comparison, and overviews."""
    last = max(summary(name, run)["last"] for name, run in found.items())
    data = {
        "runs": [summary(name, run) for name, run in found.items()],
        "run": {name: outline(name, run) for name, run in found.items()},
        "overview": {name: overview(run) for name, run in found.items()},
        "series": {name: run.curves(last) for name, run in found.items()},
        "compare": comparison(found, keys),
    }
    return page("Comparison", data)


def values(found: Sequence[Lane], keys: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Return names of columns, and a row of text per lane: last and best mean values, with the best's step.

    keys: metrics; by default scores and losses.
    """
    keys = keys or [key for key in TABLE_KEYS if any(lane.points(key)[0] for lane in found)]
    pairs = [(f"{printable(key, lines=False)}\nlast", "\nbest (step)") for key in keys]
    rows = []
    for lane in found:
        cells = [lane.name, str(min(run.lines[-1]["step"] if run.lines else 0 for run in lane.runs))]
        for key in keys:
            mean, low, high = lane.points(key)
            best = min if any(word in key for word in LESS_IS_BETTER) else max
            cells += [_value(mean[-1], low[-1], high[-1]), _best(best(mean, key=lambda p: p[1]))] if mean else ["", ""]
        rows.append([printable(cell, lines=False) for cell in cells])
    return ["run", "steps", *chain.from_iterable(pairs)], rows


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool) -> Table:
    """Return rows of text for the terminal. numbers: in all but the first column."""
    shown = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        shown.add_column(Text(name), justify="right" if numbers and place else "left", overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown


def _value(mean: Point, low: Point, high: Point) -> str:
    spread = "" if low[1] == high[1] else f" ({low[1]:.3g} to {high[1]:.3g})"
    return f"{mean[1]:.3g}{spread}"


def _best(point: Point) -> str:
    return f"{point[1]:.3g} ({point[0]:g})"


def begun(directories: Sequence[Path]) -> Sequence[Path]:
    """Return directories with a run, printing the others; all if there is none."""
    found = [directory for directory in directories if (directory / CONFIG_FILE).exists() or not directory.is_dir()]
    for directory in [directory for directory in directories if found and directory not in found]:
        tell(f"{directory}: left out, no run has begun in it")
    return found or directories


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(program("compare"), description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--keys", nargs="+", metavar="METRIC", help="metrics of metrics.jsonl; default: the report's charts"
    )
    parser.add_argument("--out", type=Path, default=Path("compare.html"), metavar="PATH", help="of the page")
    asked = parser.parse_args(arguments)
    try:
        if asked.out.suffix != ".html":
            raise ValueError(f"--out {asked.out}: the page is HTML, so the name must end with .html")
        runs = {str(directory): read_run(directory) for directory in begun(asked.runs)}
        found, keys = lanes(list(runs.values())), asked.keys or ()
        # Without keys any line will do; each has its step.
        if not any(run.series(key) for run in runs.values() for key in keys or ["step"]):
            raise ValueError(f"none of the runs has {', '.join(keys) or 'metrics'}")
        asked.out.write_text(page_of_all(runs, keys), encoding="utf-8")
    except (OSError, ValueError) as error:
        tell(f"error: {reason(error)}")
        return 2
    # Piped output has no width of its own, and rich would cut it at 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    tables = [table(*values(found, keys), numbers=True)]
    if len(found) > 1:
        told = zip((printable(lane.name, lines=False) for lane in found), differences(found), strict=True)
        tables.append(table(["\nrun", f"\n{DIFFERENCE}"], told, numbers=False))
    console.print(*tables, sep="\n")
    print(asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
