"""What a benchmark leaves behind: a table on the terminal, the raw figures as JSON, a self-contained SVG picture."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from spmd_rl.track.run import command_line, machine
from spmd_rl.track.svg import Frame, Series, axes, label, padded, polyline, rect, text, ticks

COLORS = ("#3b82c4", "#d07a2d", "#8b949e", "#4f9d69", "#a05fb5", "#c0504d")
_STYLE = """
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#7d8590;font-size:12px}
.title{font-size:15px;font-weight:600}.num{font-size:11px}
.grid{stroke:#7d8590;stroke-opacity:.22}.axis{stroke:#7d8590;stroke-opacity:.7}
polyline{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}circle{fill:currentColor}
"""


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


def bars(path: Path | None, title: str, unit: str, drawn: Sequence[Bar], mark: tuple[float, str] | None = None) -> None:
    """Draw bars under each other, longest value to the right edge. `mark`: a vertical line, and what it stands for."""
    if path is None:
        return
    width, left, right, row = 760.0, 210.0, 120.0, 26.0
    names = list(dict.fromkeys(name for bar in drawn for name, _ in bar.parts))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    top, longest = 52.0 + (18 if len(names) > 1 else 0), max([bar.total for bar in drawn] + [mark[0] if mark else 0])
    scale = (width - left - right) / (longest or 1.0)
    body = []
    for number, bar in enumerate(drawn):
        y, x = top + number * row, left
        body.append(text(left - 10, y + 13, bar.name, "end"))
        for name, value in bar.parts:
            body.append(rect(x, y, value * scale, row - 9, colors[name], f"{name}: {value:.4g} {unit}"))
            x += value * scale
        body.append(text(x + 6, y + 13, f"{bar.total:.3g} {bar.note}".strip(), "start"))
    floor = top + len(drawn) * row
    if mark is not None:
        x = left + mark[0] * scale
        body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{floor}"/>')
        body.append(text(x, floor + 12, mark[1]))
    if len(names) > 1:
        body += _legend([(name, colors[name]) for name in names], 58.0)
    _write(path, title, unit, width, floor + 22, "".join(body))


def lines(path: Path | None, title: str, x_unit: str, y_unit: str, drawn: Sequence[Series]) -> None:
    """Draw lines over a shared horizontal axis; series of one name share a colour's entry in the legend."""
    if path is None:
        return
    xs, ys = ([point[i] for series in drawn for point in series.points] for i in (0, 1))
    frame = Frame(760, 340, (min(xs), max(max(xs), min(xs) + 1e-9)), padded(ys), top=70, bottom=38)
    floor, edge = frame.height - frame.bottom, frame.width - frame.right
    body = []
    for value in ticks(*frame.y_range, 4):
        y = frame.y(value)
        body.append(f'<line class="grid" x1="{frame.left}" x2="{edge}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(text(frame.left - 8, y + 3.5, label(value), "end"))
    body += [text(frame.x(value), floor + 16, label(value)) for value in ticks(*frame.x_range, 8)]
    body.append(text(edge, floor + 31, x_unit, "end"))
    body.append(f'<line class="axis" x1="{frame.left}" x2="{edge}" y1="{floor}" y2="{floor}"/>')
    body += [polyline(frame, series) for series in drawn]
    body += _legend(list({series.name: series.color for series in drawn}.items()), 58.0)
    _write(path, title, y_unit, frame.width, frame.height, "".join(body))


def panels(path: Path | None, title: str, y_unit: str, drawn: Mapping[str, Sequence[Series]]) -> None:
    """Draw small pictures by name, four in a row, all over the same axes; the legend is that of the first."""
    if path is None:
        return
    points = [point for some in drawn.values() for series in some for point in series.points]
    xs, ys = ([point[i] for point in points] for i in (0, 1))
    width, height, top = 240.0, 170.0, 70.0
    frame = Frame(width, height, (min(xs), max(max(xs), min(xs) + 1)), padded(ys), top=24)
    body = _legend(list({series.name: series.color for series in next(iter(drawn.values()))}.items()), 58.0)
    for number, (name, some) in enumerate(drawn.items()):
        inside = axes(frame) + "".join(polyline(frame, series) for series in some) + text(width / 2, 14, name)
        body.append(f'<g transform="translate({number % 4 * width:g} {top + number // 4 * height:g})">{inside}</g>')
    rows = -(-len(drawn) // 4)
    _write(path, title, y_unit, width * min(4, len(drawn)), top + rows * height, "".join(body))


def _legend(entries: Sequence[tuple[str, str]], y: float) -> list[str]:
    parts, x = [], 10.0
    for name, color in entries:
        parts += [rect(x, y - 9, 10, 10, color, name), text(x + 15, y, name, "start")]
        x += 30 + 6.2 * len(name)
    return parts


def _write(path: Path, title: str, unit: str, width: float, height: float, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    heading = f'<text class="title" x="10" y="22">{escape(title)}</text>' + text(10, 38, unit, "start")
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img"><title>{escape(title)}</title><style>{_STYLE}</style>{heading}{body}</svg>\n'
    )
