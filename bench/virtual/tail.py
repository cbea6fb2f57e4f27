"""A picture of what `simulate` prints: speed-ups, the steps of the first and last policy, store operations.

    python -m bench.virtual.tail --replicas 8 64 512 4096 --picture docs/tail.svg

Options are those of `python -m bench.virtual.simulate`.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from bench.virtual.simulate import __main__ as simulate
from bench.virtual.simulate.policies import PolicyResult
from spmd_rl.track.svg import Frame, label, rect, svg, text, ticks

COLORS = ("#7d8590", "#4c8bf5", "#17a2b8", "#d4a017", "#a371f7", "#2da44e")
WIDTH, ROW = 900.0, 250.0
STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#7d8590;font-size:12px}"
    ".num{font-size:11px}.title{font-size:13px;font-weight:600}.grid{stroke:#7d8590;stroke-opacity:.22}"
    ".axis{stroke:#7d8590;stroke-opacity:.7}polyline{fill:none;stroke-width:2.2}"
)


def draw(results: Sequence[PolicyResult]) -> str:
    """The file's text."""
    policies = list(dict.fromkeys(r.policy for r in results))
    colors = {policy: COLORS[i % len(COLORS)] for i, policy in enumerate(policies)}
    most = max(r.replicas for r in results)
    rows = [
        (_speedups(results, colors), "generation, times faster than " + policies[0]),
        (_steps([r for r in results if r.replicas == most], colors), f"seconds of each step, {most} replicas"),
        (_operations(results, colors), "store operations per answer, looks not counted"),
    ]
    return page(colors, rows)


def page(colors: Mapping[str, str], rows: Sequence[tuple[str, str]]) -> str:
    """Return a file of charts, each (drawing, title), one below the other; `colors` are those of the names on top."""
    parts = [f"<style>{STYLE}</style>", _key(colors)]
    for number, (body, title) in enumerate(rows):
        heading = f'<text class="title" x="10" y="14">{escape(title)}</text>'
        parts.append(f'<g transform="translate(0,{40 + number * (ROW + 24):g})">{heading}{body}</g>')
    drawn = svg(WIDTH, 40 + len(rows) * (ROW + 24), "".join(parts))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _key(colors: Mapping[str, str]) -> str:
    parts = []
    for number, (policy, color) in enumerate(colors.items()):
        x = 14 + 148 * number
        parts.append(rect(x, 8, 12, 12, color, policy) + text(x + 18, 18, policy, "start"))
    return "".join(parts)


def _axes(frame: Frame) -> str:
    right, floor = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for value in ticks(*frame.y_range, 4):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(frame.left - 8, y + 3.5, label(value), "end"))
    return "".join(parts) + f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{floor}" y2="{floor}"/>'


def _bars(groups: Sequence[Sequence[tuple[float, str, str]]], names: Sequence[str]) -> str:
    """Groups of bars (height, colour, tip) side by side, each group with its name below."""
    top = max(height for group in groups for height, _, _ in group)
    frame = Frame(WIDTH, ROW, (0, len(groups)), (0, 1.08 * top), top=24)
    wide = 0.8 * (frame.x(1) - frame.x(0)) / max(map(len, groups))
    parts = [_axes(frame)]
    for number, (group, name) in enumerate(zip(groups, names, strict=True)):
        for place, (height, color, tip) in enumerate(group):
            y = frame.y(height)
            parts.append(rect(frame.x(number + 0.1) + place * wide, y, 0.9 * wide, frame.y(0) - y, color, tip))
        parts.append(text(frame.x(number + 0.5), ROW - 9, name))
    return "".join(parts)


def _speedups(results: Sequence[PolicyResult], colors: dict[str, str]) -> str:
    sizes = list(dict.fromkeys(r.replicas for r in results))
    groups = []
    for replicas in sizes:
        found = [r for r in results if r.replicas == replicas]
        times = [found[0].generate_seconds / r.generate_seconds for r in found]
        groups.append([(x, colors[r.policy], f"{r.policy}: {x:.2f}x") for r, x in zip(found, times, strict=True)])
    return _bars(groups, [f"{replicas} replicas" for replicas in sizes])


def _steps(found: Sequence[PolicyResult], colors: dict[str, str]) -> str:
    shown = [found[0], found[-1]] if len(found) > 1 else list(found)
    groups = []
    for number in range(max(len(r.steps) for r in shown)):
        times = [r.steps[number].seconds if number < len(r.steps) else 0.0 for r in shown]
        groups.append([(x, colors[r.policy], f"{r.policy}: {x:.1f} s") for r, x in zip(shown, times, strict=True)])
    return _bars(groups, [str(number + 1) for number in range(len(groups))])


def _operations(results: Sequence[PolicyResult], colors: dict[str, str]) -> str:
    sizes = sorted({r.replicas for r in results})
    curves = {}
    for policy, color in colors.items():
        found = sorted((r for r in results if r.policy == policy), key=lambda r: r.replicas)
        curves[color] = [(r.replicas, r.operations) for r in found]
    return curves_over(curves, {n: f"{n} replicas" for n in sizes})


def curves_over(curves: Mapping[str, Sequence[tuple[float, float]]], marks: Mapping[float, str]) -> str:
    """Draw colour -> points (x, y) over a logarithmic axis from the first to the last of `marks`, value -> name."""
    low, high = math.log2(min(marks)), math.log2(max(marks))
    top = 1.08 * max(y for points in curves.values() for _, y in points)
    frame = Frame(WIDTH, ROW, (low - 0.5, high + 0.5), (0, top), top=24)
    parts = [_axes(frame), *(text(frame.x(math.log2(x)), ROW - 9, name) for x, name in marks.items())]
    for color, values in curves.items():
        points = [(frame.x(math.log2(x)), frame.y(y)) for x, y in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points)
        parts.append(f'<polyline stroke="{color}" points="{path}"/>{dots}')
    return "".join(parts)


def main(arguments: Sequence[str] | None = None) -> list[PolicyResult]:
    """Simulate, and write the picture; all results."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--picture", type=Path, required=True)
    own, others = parser.parse_known_args(arguments)
    results = simulate.main(others)
    own.picture.write_text(draw(results))
    return results


if __name__ == "__main__":
    main()
