"""Compares runs: curves by run name on one page, seeds of the same settings as a band, and a table on the terminal.

    python -m spmd_rl compare runs/rlvr/a runs/rlvr/b runs/rlvr/c
    python -m spmd_rl compare runs/rlvr/* --keys val/math/score/mean actor/entropy --out compare.svg

The page needs no network. Runs whose settings differ only in the seed are drawn as one line, their mean, in a band from
minimum to maximum; it ends with the shortest of them.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spmd_rl.base.command_line import Parser, program
from spmd_rl.base.errors import plural, printable, reason, tell
from spmd_rl.config.run_identity import CONFIG_FILE, identity
from spmd_rl.track import html_page as page
from spmd_rl.track.charts import CHARTS, SCORES
from spmd_rl.track.run_reader import RunData, read_run
from spmd_rl.track.svg import Band, Point, Series, line_chart, text

SEEDS = ("seed", "data.seed")
KEYS = {
    key: f"{chart.title}: {name}" if len(chart.lines) > 1 else chart.title
    for chart in (SCORES, *CHARTS)
    for key, name in chart.lines.items()
}
"""Metrics that are drawn by default, and their titles."""
TABLE_KEYS = tuple(key for key in KEYS if "score" in key or "loss" in key)
LESS_IS_BETTER = ("loss", "diff", "time/", "seconds", "bubble", "overhead", "kl")
MAX_DIFFERING = 16
WIDTH, HEIGHT = 760.0, 260.0


@dataclass(frozen=True, slots=True)
class Lane:
    """One line of each chart: a run, or the seeds of the same settings."""

    name: str
    color: str
    runs: Sequence[RunData]

    def points(self, key: str) -> tuple[list[Point], list[Point], list[Point]]:
        """Return mean, minimum and maximum of a metric at the steps that all runs have."""
        by_run = [dict(run.series(key)) for run in self.runs]
        # A mean over fewer seeds at later steps would jump where a run ends.
        steps = sorted(set.intersection(*map(set, by_run)))
        values = [[run[step] for run in by_run] for step in steps]
        mean, low, high = ([(s, of(v)) for s, v in zip(steps, values, strict=True)] for of in (fmean, min, max))
        return mean, low, high


def lanes(runs: Sequence[RunData]) -> list[Lane]:
    """Group runs whose settings differ only in the seed, and give each lane a distinct name and colour.

    A second run with the same seed begins another lane.
    """
    together: dict[tuple[str, int], list[RunData]] = {}
    seen = Counter[str]()
    for run in runs:
        settings = json.dumps(_settings(run), sort_keys=True, default=str)
        start = f"{settings} {[run.setting(key) for key in SEEDS]}"
        together.setdefault((settings, seen[start]), []).append(run)
        seen[start] += 1
    named = [_name(group) for group in together.values()]
    twice = {name for name in named if named.count(name) > 1}
    found = []
    for number, (name, group) in enumerate(zip(named, together.values(), strict=True)):
        name = f"{name} ({group[0].directory})" if name in twice else name
        found.append(Lane(name, _color(number, len(named)), group))
    return found


def _settings(run: RunData) -> dict[str, Any]:
    """Return the settings that change samples or gradients, without the seeds; a changed setting with
    all its values.
    """
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


def _color(number: int, count: int) -> str:
    return f"var(--c{number + 1})" if count <= 8 else f"hsl({360 * number / count:.0f} 60% 52%)"


def differences(found: Sequence[Lane]) -> list[str]:
    """Return for each lane the settings in which the lanes differ. Example: `policy.lr=1e-05`."""
    pipelines = [lane.runs[0].about.get("pipeline") for lane in found]
    settings = [_settings(lane.runs[0]) for lane in found]
    keys = sorted(set().union(*settings))
    # Pipelines have different settings, of which only the common ones can be compared.
    if len(set(pipelines)) > 1:
        settings = [{"pipeline": name, **tree} for name, tree in zip(pipelines, settings, strict=True)]
        keys = ["pipeline", *(key for key in keys if all(key in tree for tree in settings))]
    differing = [key for key in keys if len({str(tree.get(key)) for tree in settings}) > 1]
    more = f", and {len(differing) - MAX_DIFFERING} more" if len(differing) > MAX_DIFFERING else ""
    return [", ".join(f"{key}={tree.get(key)}" for key in differing[:MAX_DIFFERING]) + more for tree in settings]


def charts(found: Sequence[Lane], keys: Sequence[str]) -> dict[str, str]:
    """Return the chart of each metric that any of the runs has."""
    drawn = {}
    for key in keys:
        lines, bands = [], []
        for lane in found:
            mean, low, high = lane.points(key)
            lines.append(Series(lane.name, lane.color, mean))
            if len(lane.runs) > 1 and mean:
                bands.append(Band(lane.color, low, high))
        if chart := line_chart(lines, WIDTH, HEIGHT, bands):
            drawn[key] = chart
    return drawn


def html(found: Sequence[Lane], keys: Sequence[str]) -> str:
    """Return the page's HTML, with all charts."""
    keys_of_lanes = "".join(page.key(lane.name, lane.color) for lane in found)
    figures = [page.figure(KEYS.get(key, key), key, "", chart) for key, chart in charts(found, keys).items()]
    rows = [[lane.name, told, str(len(lane.runs))] for lane, told in zip(found, differences(found), strict=True)]
    body = (
        f'<h1>{plural(len(found), "run")} compared</h1><div class="keys" style="margin:12px 0">{keys_of_lanes}</div>'
        f'<div class="grid2">{"".join(figures)}</div>'
        + page.section("Runs", page.table(["run", "settings that differ", "seeds"], rows))
    )
    return page.document("Comparison - spmd_rl", body)


def drawing(found: Sequence[Lane], keys: Sequence[str]) -> str:
    """Return all charts, one below the other, as one SVG in the colours of the page."""
    parts, y = [], 10.0
    for number, lane in enumerate(found):
        parts.append(f'<circle cx="16" cy="{y + 18 * number}" r="5" fill="{lane.color}"/>')
        parts.append(text(28, y + 18 * number + 4, lane.name, "start"))
    y += 18 * len(found) + 20
    for key, chart in charts(found, keys).items():
        sized = f'<svg y="{y}" width="{WIDTH:g}" height="{HEIGHT:g}" '
        parts.append(text(10, y - 6, KEYS.get(key, key), "start") + chart.replace("<svg ", sized, 1))
        y += HEIGHT + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {y:g}" width="{WIDTH:g}" height="{y:g}">'
        f"<style>{page.STYLE}text{{font-family:system-ui,sans-serif;fill:var(--soft)}}</style>{''.join(parts)}</svg>\n"
    )


def table(found: Sequence[Lane], keys: Sequence[str]) -> Table:
    """Return last and best values, the best with its step; for several seeds, those of their mean."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("run", overflow="fold")
    shown.add_column("steps", justify="right")
    for key in keys:
        shown.add_column(Text(f"{printable(key, lines=False)}\nlast"), justify="right", overflow="fold")
        shown.add_column("\nbest (step)", justify="right", overflow="fold")
    for lane in found:
        cells = []
        for key in keys:
            mean, low, high = lane.points(key)
            best = min if any(word in key for word in LESS_IS_BETTER) else max
            cells += [_value(mean[-1], low[-1], high[-1]), _best(best(mean, key=lambda p: p[1]))] if mean else ["", ""]
        steps = min(run.lines[-1]["step"] if run.lines else 0 for run in lane.runs)
        shown.add_row(*(Text(printable(cell, lines=False)) for cell in (lane.name, str(steps), *cells)))
    return shown


def settings_table(found: Sequence[Lane]) -> Table:
    """Return the settings in which the lanes differ."""
    shown = Table("\nsettings that differ", "", box=None, pad_edge=False)
    for lane, told in zip(found, differences(found), strict=True):
        shown.add_row(*(Text(printable(cell, lines=False), overflow="fold") for cell in (lane.name, told)))
    return shown


def _value(mean: Point, low: Point, high: Point) -> str:
    spread = "" if low[1] == high[1] else f" ({low[1]:.3g} to {high[1]:.3g})"
    return f"{mean[1]:.3g}{spread}"


def _best(point: Point) -> str:
    return f"{point[1]:.3g} ({point[0]:g})"


def begun(directories: Sequence[Path]) -> Sequence[Path]:
    """Return the directories with a run, and print which are left out; all directories if there is no run."""
    found = [directory for directory in directories if (directory / CONFIG_FILE).exists() or not directory.is_dir()]
    for directory in [directory for directory in directories if found and directory not in found]:
        tell(f"{directory}: left out, no run has begun in it")
    return found or directories


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(program("compare"), description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--keys", nargs="+", metavar="METRIC", help="metrics of metrics.jsonl; default: the report's")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), metavar="PATH", help="*.html or *.svg")
    asked = parser.parse_args(arguments)
    try:
        found = lanes([read_run(directory) for directory in begun(asked.runs)])
        keys = asked.keys or list(KEYS)
        if not charts(found, keys):
            raise ValueError(f"none of the runs has {', '.join(keys)}")
        asked.out.write_text((drawing if asked.out.suffix == ".svg" else html)(found, keys), encoding="utf-8")
    except (OSError, ValueError) as error:
        tell(f"error: {reason(error)}")
        return 2
    # Piped output has no width of its own, and rich would cut it at 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    drawn = [key for key in TABLE_KEYS if any(lane.points(key)[0] for lane in found)]
    console.print(table(found, asked.keys or drawn or keys[:1]), *[settings_table(found)] * (len(found) > 1), sep="\n")
    print(asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
