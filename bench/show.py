"""Output of a benchmark: a table on the terminal, the raw figures as JSON, an SVG picture by matplotlib."""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from spmd_rl.track.run import command_line, machine

COLORS = ("#3b82c4", "#d07a2d", "#8b949e", "#4f9d69", "#a05fb5", "#c0504d")
GRAY = "#7d8590"
"""Colour of texts and axes, which can be read on white and on black."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bench",
    "font.size": 9,
    "text.color": GRAY,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRAY,
    "grid.alpha": 0.22,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "legend.frameon": False,
}
"""Settings of matplotlib: texts stay texts, and the same figures give the same file."""


@dataclass(frozen=True)
class Series:
    """The points of one line."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown, to be copied into the lab book as it stands."""
    drawn = Table(title=title, title_justify="left", box=MARKDOWN)
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        drawn.add_row(*row)
    Console(width=160).print(drawn)


def record(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write the raw figures with the line and the machine that made them; nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        origin = {"command": command_line(), "machine": machine(), "time": time.strftime("%Y-%m-%d %H:%M")}
        path.write_text(json.dumps(origin | dict(figures), indent=1) + "\n")


def mean_and_range(values: Sequence[float], form: str = ".2f") -> str:
    """`3.1`, or `3.1 (2.9 - 3.3)` where there are several."""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} - {max(values):{form}})"


@dataclass(frozen=True)
class Bar:
    """One horizontal bar. `parts` are stacked: (name, value); a bar without parts of its own has one."""

    name: str
    parts: Sequence[tuple[str, float]]
    note: str = ""
    """behind the bar, after its value"""

    @property
    def total(self) -> float:
        """Length of the whole bar."""
        return sum(value for _, value in self.parts)


@contextmanager
def canvas(
    path: Path,
    title: str,
    size: tuple[float, float],
    grid: tuple[int, int] = (1, 1),
    keys: Mapping[str, str] | None = None,
) -> Iterator[list[Any]]:
    """The axes of a picture, which is written at the end.

    size: in inches; grid: rows and columns of axes; keys: names and colours of the legend, if there are several.
    """
    # Not every environment of a benchmark has it.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        drawn = list(figure.subplots(*grid, squeeze=False).flat)
        yield drawn
        for axes in drawn:
            axes.set_visible(axes.has_data())
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontweight="bold")
        if keys and len(keys) > 1:
            handles = [Patch(color=color, label=name) for name, color in keys.items()]
            figure.legend(handles=handles, loc="outside lower left", ncols=5, handlelength=0.8, columnspacing=1.2)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Title": title})


def bars(path: Path | None, title: str, unit: str, drawn: Sequence[Bar], mark: tuple[float, str] | None = None) -> None:
    """Draw bars under each other, their parts stacked. `mark`: a vertical line, and what it stands for."""
    if path is None:
        return
    names = list(dict.fromkeys(name for bar in drawn for name, _ in bar.parts))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    with canvas(path, title, (7.9, 1.3 + 0.28 * len(drawn)), keys=colors) as (axes,):
        for bar in drawn:
            left = 0.0
            for name, value in bar.parts:
                axes.barh(bar.name, value, left=left, color=colors[name], height=0.66)
                left += value
            axes.annotate(f" {bar.total:.3g} {bar.note}".rstrip(), (left, bar.name), verticalalignment="center")
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_xlabel(unit)
        axes.grid(True, axis="x")
        if mark is not None:
            axes.axvline(mark[0], color=GRAY, linestyle="--", linewidth=1)
            axes.annotate(f" {mark[1]}", (mark[0], 0), xycoords=("data", "axes fraction"))


def draw(axes: Any, some: Sequence[Series]) -> None:
    """Draw lines with a dot at each of few points, over a grid."""
    for series in some:
        dots = "o" if len(series.points) <= 60 else ""
        axes.plot(*zip(*series.points, strict=True), color=series.color, marker=dots, markersize=3, linewidth=1.7)
    axes.grid(True, axis="y")


def lines(path: Path | None, title: str, x_unit: str, y_unit: str, drawn: Sequence[Series]) -> None:
    """Draw lines over a shared horizontal axis; series of one name share an entry of the legend."""
    if path is None:
        return
    with canvas(path, title, (7.9, 3.6), keys={series.name: series.color for series in drawn}) as (axes,):
        draw(axes, drawn)
        axes.set_xlabel(x_unit)
        axes.set_ylabel(y_unit)


def panels(path: Path | None, title: str, y_unit: str, drawn: Mapping[str, Sequence[Series]]) -> None:
    """Draw small pictures by name, four in a row, all over the same axes; the legend is that of the first."""
    if path is None:
        return
    keys = {series.name: series.color for series in next(iter(drawn.values()))}
    rows, columns = -(-len(drawn) // 4), min(4, len(drawn))
    with canvas(path, title, (2.5 * columns, 0.8 + 1.8 * rows), (rows, columns), keys) as all_axes:
        highest = max(y for some in drawn.values() for series in some for _, y in series.points)
        for axes, (name, some) in zip(all_axes, drawn.items(), strict=False):
            draw(axes, some)
            axes.set_title(name, fontsize=9)
            axes.set_ylim(0, 1.05 * highest)
        all_axes[0].set_ylabel(y_unit)
