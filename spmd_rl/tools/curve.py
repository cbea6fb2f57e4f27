"""Draws the learning curves of one or more runs as an SVG for a README, legible on light and dark pages.

python -m spmd_rl curve RUN_DIR [RUN_DIR...] --out docs/curve.svg
"""

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from spmd_rl.command_line import Parser, program
from spmd_rl.errors import reason, tell
from spmd_rl.track.run_reader import RunData, read_run
from spmd_rl.track.svg import Series, axes, frame_around, polyline

WIDTH, HEIGHT = 760.0, 340.0
KINDS = (
    ("held-out, greedy", "val/score_greedy/mean", "#d07a2d"),
    ("held-out, sampled", "val/score/mean", "#3b82c4"),
    ("training", "critic/score/mean", "#8b949e"),
)
# Middle greys and tones are legible on white and on black.
_STYLE = """
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#7d8590;font-size:12px}
.title{font-size:15px;font-weight:600}.num{font-size:11px}.key{font-size:12px;font-weight:600}
.grid{stroke:#7d8590;stroke-opacity:.22}.axis{stroke:#7d8590;stroke-opacity:.7}
polyline{fill:none;stroke:currentColor;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.faint{stroke-width:1;opacity:.35}circle{fill:currentColor}
"""


def draw(runs: Sequence[RunData], title: str) -> str:
    """Return the SVG document. Raises ValueError where no run has a score."""
    lines = [Series(name, color, run.series(key)) for name, key, color in KINDS for run in runs]
    lines = [line for line in lines if line.points]
    if not lines:
        raise ValueError("no scores to draw")
    frame = frame_around(lines, WIDTH, HEIGHT, left=44, right=140, top=48, bottom=34)
    body = axes(frame) + "".join(polyline(frame, line) for line in reversed(lines)) + _legend(lines)
    heading = (
        f'<text class="title" x="10" y="22">{escape(title)}</text><text class="num" x="10" y="38">mean score</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" width="{WIDTH:g}" '
        f'height="{HEIGHT:g}" role="img"><title>{escape(title)}</title><style>{_STYLE}</style>{heading}{body}</svg>\n'
    )


def _legend(lines: Sequence[Series]) -> str:
    """Return the name of each kind with the last value of each of its lines, in a column on the right."""
    ends: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        ends.setdefault((line.name, line.color), []).append(f"{line.points[-1][1]:.2f}")
    x = WIDTH - 128
    return "".join(
        f'<text class="key" x="{x}" y="{64 + 36 * row}" style="fill:{color}">{escape(name)}</text>'
        f'<text class="num" x="{x}" y="{78 + 36 * row}">{", ".join(values)}</text>'
        for row, ((name, color), values) in enumerate(ends.items())
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(program("curve"), description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="*.svg")
    parser.add_argument("--title", default="Score by training step", help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        drawing = draw([read_run(directory) for directory in options.runs], options.title)
        options.out.write_text(drawing, encoding="utf-8")
    except (OSError, ValueError) as error:
        tell(f"error: {reason(error)}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
