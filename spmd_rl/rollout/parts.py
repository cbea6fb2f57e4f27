"""The parts of the verdicts of an environment's episodes: sums that ranks report, and means over all of them.

A part is a number of the environment's, such as `success`, or why the episode ended, such as `stop/max_turns`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from spmd_rl.types import Sample


def sum_parts(samples: Iterable[Sample]) -> dict[str, tuple[float, int]]:
    """Return the sum of each part of the verdicts of an environment's episodes, and how many have it."""
    sums: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.last and not sample.greedy and sample.verdict.scored and sample.turns[-1].step is not None:
            for name, value in sample.verdict.parts.items():
                sums[name].append(value)
    return {name: (sum(values), len(values)) for name, values in sorted(sums.items())}


def mean_parts(parts: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Return the mean of each part, by name."""
    pairs: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for some in parts:
        for name, pair in some.items():
            pairs[name].append(pair)
    return {name: sum(v for v, _ in found) / sum(n for _, n in found) for name, found in sorted(pairs.items())}
