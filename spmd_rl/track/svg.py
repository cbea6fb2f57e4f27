"""Small charts as SVG text: lines over steps, stacked bars. Colours come from the page's CSS variables.

Left out: anything a report of one run does not need (log axes, legends inside the plot, zoom).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MAX_POINTS = 300
"""A longer series is drawn as the means of so many equal slices."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line. Example: `Series("held-out, greedy", "var(--c2)", [(0, 0.8), (4, 0.93)])`."""

    name: str
    color: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart of `width` x `height`, and the values that its edges stand for."""

    width: float
    height: float
    x_range: Point
    y_range: Point
    left: float = 46
    right: float = 14
    top: float = 10
    bottom: float = 26

    def x(self, value: float) -> float:
        """Horizontal position of a value."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Vertical position of a value."""
        low, high = self.y_range
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom)


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """About `count` round values from `low` to `high`; only integers where `whole`."""
    step = (high - low) / max(count, 1)
    size = 10.0 ** math.floor(math.log10(step))
    step = next(size * nice for nice in (1, 2, 2.5, 5, 10) if size * nice >= step * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """A number as short as it can be said: `0.25`, `1200`, `15k`, `2e-05`."""
    if value == 0:
        return "0"
    if abs(value) >= 10000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: the means of equal slices."""
    if len(points) <= limit:
        return list(points)
    bounds = [round(i * len(points) / limit) for i in range(limit + 1)]
    slices = [points[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in slices]


def padded(values: Sequence[float]) -> Point:
    """A range that shows all values: [0, 1] for shares, else from 0 or with some air."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1 and high > 0.3:
        return 0.0, 1.0
    if low >= 0 and low < 0.6 * high:
        return 0.0, high * 1.08
    air = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    return low - air, high + air


def axes(frame: Frame, y_count: int = 4, x_label: str = "step", x_whole: bool = True) -> str:
    """Grid lines and numbers."""
    parts = []
    right, floor = frame.width - frame.right, frame.height - frame.bottom
    for value in ticks(*frame.y_range, y_count):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="num" x="{frame.left - 8}" y="{y + 3.5:.1f}" text-anchor="end">{label(value)}</text>')
    for value in ticks(*frame.x_range, 8, whole=x_whole):
        x = frame.x(value)
        if x < right - 34:  # the axis's name stands there
            parts.append(f'<text class="num" x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{label(value)}</text>')
    parts.append(f'<text class="num" x="{right}" y="{floor + 17}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    return "".join(parts)


def polyline(frame: Frame, series: Series) -> str:
    """The line, with a dot per point where there are few."""
    points = [(frame.x(x), frame.y(y)) for x, y in thin(series.points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in points) if len(points) <= 40 else ""
    line = f'<polyline points="{path}"/>' if len(points) > 1 else ""
    return f'<g class="line" style="--c:{series.color}">{line}{dots}</g>'


def line_chart(all_series: Sequence[Series], width: float = 560, height: float = 210) -> str:
    """Lines over steps; empty series are left out, and a chart without any is an empty string."""
    shown = [series for series in all_series if series.points]
    if not shown:
        return ""
    xs = [x for series in shown for x, _ in series.points]
    ys = [y for series in shown for _, y in series.points]
    last = max(xs) if max(xs) > min(xs) else min(xs) + 1
    frame = Frame(width, height, (min(xs), last), padded(ys))
    lines = "".join(polyline(frame, series) for series in shown)
    return svg(width, height, axes(frame) + lines)


def stacked_bars(
    steps: Sequence[float], columns: Sequence[Series], width: float = 1150, height: float = 230
) -> str:
    """One bar a step, the parts of `columns` (y per step, in the order of `steps`) on top of each other."""
    totals = [sum(column.points[i][1] for column in columns) for i in range(len(steps))]
    frame = Frame(width, height, (-0.5, len(steps) - 0.5), (0, max(totals) * 1.05 or 1))
    bar = (frame.x(1) - frame.x(0)) * (0.78 if len(steps) > 1 else 0.2)
    parts = []
    for i, step in enumerate(steps):
        base = 0.0
        for column in columns:
            value = column.points[i][1]
            if value > 0:
                y, tall = frame.y(base + value), frame.y(base) - frame.y(base + value)
                base += value
                tip = f"<title>step {label(step)}: {escape(column.name)} {value:.2f} s of {totals[i]:.2f} s</title>"
                parts.append(
                    f'<rect x="{frame.x(i) - bar / 2:.1f}" y="{y:.1f}" width="{bar:.1f}" height="{tall:.2f}" '
                    f'fill="{column.color}">{tip}</rect>'
                )
    stride = max(1, math.ceil(len(steps) / 24))
    names = "".join(
        f'<text class="num" x="{frame.x(i):.1f}" y="{height - 9}" text-anchor="middle">{label(round(steps[i]))}</text>'
        for i in range(0, len(steps), stride)
        if frame.x(i) < width - 50
    )
    blank = Frame(width, height, (0.2, 0.8), frame.y_range)
    return svg(width, height, axes(blank) + "".join(parts) + names)


def svg(width: float, height: float, body: str) -> str:
    """The element, as wide as its column."""
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img">{body}</svg>'
