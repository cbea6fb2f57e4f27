"""Small charts as SVG text: lines over steps and stacked bars. Colours may be CSS variables of the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from spmd_rl.base.errors import printable

MAX_POINTS = 300
"""Largest number of points of a series; a longer one is drawn as means of this many equal slices."""
MAX_DOTS = 60
"""Largest number of points that are drawn as dots; a longer line is smoothed."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one line. Example: `Series("held-out, greedy", "var(--c2)", [(0, 0.8), (4, 0.93)])`."""

    name: str
    color: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Band:
    """The area between two lines over the same steps, such as the minimum and maximum of some seeds."""

    color: str
    low: Sequence[Point]
    high: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart of `width` x `height` units, and the values at its edges."""

    width: float
    height: float
    x_range: Point
    y_range: Point
    left: float = 46
    right: float = 14
    top: float = 10
    bottom: float = 26

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        low, high = self.y_range
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom)


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Return about `count` round values from `low` to `high`; only integers if `whole`."""
    step = (high - low) / max(count, 1)
    size = 10.0 ** math.floor(math.log10(step))
    step = next(size * nice for nice in (1, 2, 2.5, 5, 10) if size * nice >= step * 0.85)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """Format a number shortly: `0.25`, `1200`, `15k`, `2e-05`."""
    if value == 0:
        return "0"
    if abs(value) >= 10000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def labels(values: Sequence[float]) -> list[str]:
    """Format the numbers of one axis shortly, with enough digits to keep them distinct."""
    words = [label(value) for value in values]
    digits = 4
    while len(set(words)) < len(words) and digits < 12:
        words = [f"{value:.{digits}g}" for value in values]
        digits += 1
    return words


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Reduce a series to at most `limit` points, the means of equal slices."""
    if len(points) <= limit:
        return list(points)
    bounds = [round(i * len(points) / limit) for i in range(limit + 1)]
    slices = [points[a:b] for a, b in pairwise(bounds)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in slices]


def padded(values: Sequence[float]) -> Point:
    """Return a range that shows all values: [0, 1] for shares, else from 0 or with a margin on both sides."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1 and high > 0.3:
        return 0.0, 1.0
    if low >= 0 and low < 0.85 * high:
        return 0.0, high * 1.08
    margin = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def axes(frame: Frame, x_ticks: bool = True) -> str:
    """Draw grid lines and numbers; the horizontal axis counts steps."""
    parts = []
    right, floor = frame.width - frame.right, frame.height - frame.bottom
    values = ticks(*frame.y_range, 4)
    for value, words in zip(values, labels(values), strict=True):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(frame.left - 8, y + 3.5, words, "end"))
    for value in ticks(*frame.x_range, 8, whole=True) if x_ticks else ():
        parts.append(text(frame.x(value), floor + 17, label(value)))
    parts.append(text(frame.left - 8, floor + 17, "step", "end"))
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    return "".join(parts)


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the centred moving mean over a twenty-fifth of the series."""
    reach = max(1, len(points) // 50)
    windows = [(x, points[max(0, i - reach) : i + reach + 1]) for i, (x, _) in enumerate(points)]
    return [(x, sum(y for _, y in window) / len(window)) for x, window in windows]


def polyline(frame: Frame, series: Series) -> str:
    """Draw a series: few points with a dot each, many faintly behind their moving mean."""
    points = thin(series.points)
    if len(points) > MAX_DOTS:
        faint = f'<polyline class="faint" points="{_path(frame, points)}"/>'
        drawn = f'{faint}<polyline points="{_path(frame, smooth(points))}"/>'
    else:
        dots = (_dot(frame, x, y) for x, y in points)
        drawn = f'<polyline points="{_path(frame, points)}"/>{"".join(dots)}'
    return f'<g class="line" style="color:{series.color}">{drawn}</g>'


def _path(frame: Frame, points: Sequence[Point]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _dot(frame: Frame, x: float, y: float) -> str:
    return (
        f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.4"><title>step {label(x)}: {y:.4g}</title></circle>'
    )


def _room(y_range: Point) -> float:
    """Return the width of the numbers of a vertical axis."""
    return max(46.0, 12 + 6.8 * max((len(words) for words in labels(ticks(*y_range, 4))), default=0))


def line_chart(
    all_series: Sequence[Series], width: float = 560, height: float = 210, bands: Sequence[Band] = ()
) -> str:
    """Draw lines over steps, and bands behind them. Empty series are skipped; an empty string without any other."""
    shown = [series for series in all_series if series.points]
    if not shown:
        return ""
    edges = [Series("", band.color, points) for band in bands for points in (band.low, band.high) if points]
    xs, ys = zip(*(point for series in (*shown, *edges) for point in series.points), strict=True)
    last = max(xs) if max(xs) > min(xs) else min(xs) + 1
    y_range = padded(ys)
    frame = Frame(width, height, (min(xs), last), y_range, _room(y_range))
    drawn = [_area(frame, band) for band in bands] + [polyline(frame, series) for series in shown]
    return svg(width, height, axes(frame) + "".join(drawn))


def _area(frame: Frame, band: Band) -> str:
    around = [*thin(band.low), *reversed(thin(band.high))]
    return f'<polygon points="{_path(frame, around)}" fill="{band.color}" fill-opacity=".18"/>'


def stacked_bars(steps: Sequence[float], columns: Sequence[Series], width: float = 1150, height: float = 230) -> str:
    """Draw one bar a step with the values of all `columns` stacked; each has one point per step of `steps`."""
    totals = [sum(column.points[i][1] for column in columns) for i in range(len(steps))]
    y_range = (0.0, max(totals) * 1.05 or 1.0)
    frame = Frame(width, height, (-0.5, len(steps) - 0.5), y_range, _room(y_range))
    wide = (frame.x(1) - frame.x(0)) * (0.78 if len(steps) > 1 else 0.2)
    parts = []
    for i, step in enumerate(steps):
        base = 0.0
        for column in columns:
            value = column.points[i][1]
            if value > 0:
                y, tall = frame.y(base + value), frame.y(base) - frame.y(base + value)
                base += value
                tip = f"step {label(step)}: {column.name} {value:.2f} s of {totals[i]:.2f} s"
                parts.append(rect(frame.x(i) - wide / 2, y, wide, tall, column.color, tip))
    first, stride = steps[0], (steps[-1] - steps[0]) / max(len(steps) - 1, 1) or 1
    marks = ticks(first, max(steps[-1], first + 1), 14, whole=True) if len(steps) > 16 else steps
    names = [text(frame.x((step - first) / stride), height - 9, label(step)) for step in marks]
    return svg(width, height, axes(frame, x_ticks=False) + "".join(parts + names))


def duration(seconds: float) -> str:
    """Format a duration in seconds. Example: `4 min 10 s`."""
    whole = round(seconds)
    if whole < 100:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    """Draw a number or a short name."""
    words = escape(printable(words, lines=False))
    return f'<text class="num" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, color: str, tip: str, look: str = "solid") -> str:
    """Draw a rectangle with a tooltip: `solid`, `pale` or `striped` (across, so that a narrow one shows it too)."""
    if look == "striped":
        middle = x + width / 2
        return (
            f'<line class="striped" x1="{middle:.2f}" x2="{middle:.2f}" y1="{y:.2f}" y2="{y + height:.2f}" '
            f'stroke="{color}" stroke-width="{width:.2f}"><title>{escape(tip)}</title></line>'
        )
    return (
        f'<rect class="{look}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{color}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def svg(width: float, height: float, body: str) -> str:
    """Return the `svg` element, as wide as its column."""
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img">{body}</svg>'
