"""Learning curves of runs as an SVG for a document: a panel for each metric, seeds of the same settings as a band.

python -m bench.curves RUN_DIR... --keys critic/score/mean val/score/mean --svg curves.svg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench import show
from spmd_rl.tools.compare import lanes
from spmd_rl.track.run_reader import read_run


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the curves as said on the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    made.add_argument("--keys", nargs="+", default=["critic/score/mean", "val/score/mean"], metavar="METRIC")
    made.add_argument("--title", default="Curves by step")
    made.add_argument("--svg", type=Path, required=True, metavar="PATH")
    asked = made.parse_args(arguments)
    found = lanes([read_run(directory) for directory in asked.runs])
    colors = {lane.name: show.COLORS[number % len(show.COLORS)] for number, lane in enumerate(found)}
    with show.canvas(asked.svg, asked.title, (7.9, 3.2 * len(asked.keys)), (len(asked.keys), 1), colors) as all_axes:
        for axes, key in zip(all_axes, asked.keys, strict=True):
            for lane in found:
                mean, low, high = lane.points(key)
                if mean:
                    show.draw(axes, [show.Series(lane.name, colors[lane.name], mean)])
                    if len(lane.runs) > 1:
                        ys = ([y for _, y in edge] for edge in (low, high))
                        axes.fill_between([x for x, _ in low], *ys, color=colors[lane.name], alpha=0.18, linewidth=0)
            axes.set_title(key, loc="left", fontsize=9)


if __name__ == "__main__":
    main()
