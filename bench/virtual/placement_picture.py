"""A picture of when split placement pays: speed-up over colocated against training time and the length of the tail."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import show
from bench.virtual.comparison import Comparison
from bench.virtual.simulate.lengths import Lengths, long_tail
from bench.virtual.simulate.scene import Scene
from bench.virtual.tail import COLORS, curves
from bench.virtual.two_sides import Costs

TAILS = (2, 5, 10, 20, 40)
"""How many medians the longest answer has."""
RATIOS = {1 / 16: "1/16", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1", 2: "2", 4: "4"}
"""Seconds of training over seconds of generation, both colocated."""
CARRIED = {"carried": "split, carried answers", "lent": "lent ranks, carried answers"}


def draw(
    path: Path,
    scene: Scene,
    law: tuple[float, float],
    costs: Costs,
    shares: Sequence[float],
    policies: Sequence[str],
    steps: int,
    modes: Sequence[str] = (),
) -> None:
    """Write the picture. law: median and sigma; shares: of ranks that train, of which the best is taken.

    A chart for each policy at a staleness of 1, and for each of `modes` (`carried`, `lent`), over the colocated run of
    the first policy.
    """
    colors = {f"longest {tail} medians": COLORS[i % len(COLORS)] for i, tail in enumerate(TAILS)}
    rows = [f"split, {policy}, staleness 1" for policy in policies]
    rows += [f"{CARRIED[mode]}, staleness 1" for mode in modes]
    points: dict[str, dict[str, list[tuple[float, float]]]] = {row: {} for row in rows}
    for tail, name in zip(TAILS, colors, strict=True):
        median, sigma = law
        lengths = Lengths(long_tail(median, sigma, round(tail * median)), scene.lengths.seed, scene.lengths.correlation)
        at = replace(scene, lengths=lengths)
        base = Comparison(at, policies[0], steps)
        generate = 3600 / base.colocated(replace(costs, train=0.0)).steps_per_hour
        others = [base if policy == policies[0] else Comparison(at, policy, steps) for policy in policies]
        for ratio in RATIOS:
            seconds = replace(costs, train=ratio * generate)
            first = base.colocated(seconds).steps_per_hour
            found = [split.best_split(seconds, shares, max_staleness=1) for split in others]
            found += [base.best_carried(seconds, shares, 1, lends=mode == "lent") for mode in modes]
            for row, best in zip(rows, found, strict=True):
                points[row].setdefault(name, []).append((ratio, best.steps_per_hour / first))
    told = f"steps an hour over the colocated run with {policies[0]}, by training / generation; {scene.replicas} ranks"
    with show.canvas(path, told, (9.4, 3 * len(rows)), (len(rows), 1), colors) as all_axes:
        for axes, row in zip(all_axes, rows, strict=True):
            curves(axes, row, [show.Series(name, colors[name], some) for name, some in points[row].items()], RATIOS)
