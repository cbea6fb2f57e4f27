"""A picture of what `simulate` prints: speed-ups, the steps of the first and last policy, store operations.

    python -m bench.virtual.tail --replicas 8 64 512 4096 --picture docs/tail.svg

Options are those of `python -m bench.virtual.simulate`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import show
from bench.virtual.simulate import __main__ as simulate
from bench.virtual.simulate.policies import PolicyResult

COLORS = ("#7d8590", "#4c8bf5", "#17a2b8", "#d4a017", "#a371f7", "#2da44e")
Group = tuple[str, Sequence[tuple[float, str]]]
"""Name of some bars side by side, and their heights and colours."""


def draw(path: Path, results: Sequence[PolicyResult]) -> None:
    """Write the picture."""
    policies = list(dict.fromkeys(r.policy for r in results))
    colors = {policy: COLORS[i % len(COLORS)] for i, policy in enumerate(policies)}
    most = max(r.replicas for r in results)
    with show.canvas(path, "Generation in a step", (9.4, 9), (3, 1), colors) as (speed, steps, operations):
        bars(speed, f"generation, times faster than {policies[0]}", _speedups(results, colors))
        bars(
            steps, f"seconds of each step, {most} replicas", _steps([r for r in results if r.replicas == most], colors)
        )
        title = "store operations per answer, looks not counted"
        curves(operations, title, *_operations(results, colors))


def bars(axes: Any, title: str, groups: Sequence[Group]) -> None:
    """Draw groups of bars side by side, each group with its name below."""
    wide = 0.8 / max(len(group) for _, group in groups)
    for number, (_, group) in enumerate(groups):
        for place, (height, color) in enumerate(group):
            axes.bar(number + (place + 0.5) * wide - 0.4, height, 0.9 * wide, color=color)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups])
    axes.set_title(title, loc="left", fontsize=9)
    axes.grid(True, axis="y")


def curves(axes: Any, title: str, drawn: Sequence[show.Series], marks: Mapping[float, str]) -> None:
    """Draw lines from 0 over a logarithmic axis with the names of `marks` below."""
    show.draw(axes, drawn)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(list(marks), list(marks.values()))
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=9)


def _speedups(results: Sequence[PolicyResult], colors: Mapping[str, str]) -> list[Group]:
    groups = []
    for replicas in dict.fromkeys(r.replicas for r in results):
        found = [r for r in results if r.replicas == replicas]
        times = [(found[0].generate_seconds / r.generate_seconds, colors[r.policy]) for r in found]
        groups.append((f"{replicas} replicas", times))
    return groups


def _steps(found: Sequence[PolicyResult], colors: Mapping[str, str]) -> list[Group]:
    shown = [found[0], found[-1]] if len(found) > 1 else list(found)
    return [
        (str(number + 1), [(r.steps[number].seconds, colors[r.policy]) for r in shown if number < len(r.steps)])
        for number in range(max(len(r.steps) for r in shown))
    ]


def _operations(
    results: Sequence[PolicyResult], colors: Mapping[str, str]
) -> tuple[list[show.Series], dict[float, str]]:
    lines = []
    for policy, color in colors.items():
        found = sorted((r for r in results if r.policy == policy), key=lambda r: r.replicas)
        lines.append(show.Series(policy, color, [(r.replicas, r.operations) for r in found]))
    return lines, {n: f"{n} replicas" for n in sorted({r.replicas for r in results})}


def main(arguments: Sequence[str] | None = None) -> list[PolicyResult]:
    """Simulate, and write the picture; all results."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--picture", type=Path, required=True)
    own, others = parser.parse_known_args(arguments)
    results = simulate.main(others)
    draw(own.picture, results)
    return results


if __name__ == "__main__":
    main()
