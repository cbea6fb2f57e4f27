"""How long answers get: a law and, for each answer, a pure function of (seed, ticket, answer).

Answers of one ticket are alike: their normal deviates have `correlation` (a Gaussian copula over the law).
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, fmean

from spmd_rl.base.errors import UserError
from spmd_rl.data.seeds import counter_seed

Law = Callable[[float], int]
"""Standard normal deviate -> answer tokens, rising."""

_NORMAL = NormalDist()


def long_tail(median: float, sigma: float, cap: int) -> Law:
    """Lognormal; answers are cut off at `cap` tokens, as by `rollout.max_new_tokens`."""
    return lambda z: max(1, min(cap, round(median * math.exp(sigma * z))))


def recorded(path: Path) -> Law:
    """The lengths in a file: a number a line, or the samples of a run (`samples/*.jsonl`). UserError otherwise."""
    lengths = sorted(_length(path, number, line) for number, line in enumerate(path.read_text().splitlines(), 1))
    if not lengths:
        raise UserError(f"{path}: holds no lengths")
    return lambda z: lengths[min(len(lengths) - 1, int(_NORMAL.cdf(z) * len(lengths)))]


def _length(path: Path, number: int, line: str) -> int:
    try:
        row = json.loads(line)
        length = row if isinstance(row, int) else sum(len(turn["token_ids"]) for turn in row["turns"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}:{number}: neither a number of tokens nor a sample of a run") from None
    if length < 1:
        raise UserError(f"{path}:{number}: an answer has at least one token")
    return length


class Lengths:
    """Tokens of every answer of a run."""

    def __init__(self, law: Law, seed: int = 0, correlation: float = 0.5) -> None:
        self.seed, self.correlation = seed, correlation
        self._law = law
        self._shared, self._own = math.sqrt(correlation), math.sqrt(1 - correlation)
        self._tickets: dict[tuple[int, int], tuple[int, ...]] = {}

    def of(self, ticket: int, answers: int) -> tuple[int, ...]:
        """Lengths of a ticket's answers, in tokens."""
        key = (ticket, answers)
        if key not in self._tickets:
            shared = self._shared * self._deviate(ticket, -1)
            self._tickets[key] = tuple(
                self._law(shared + self._own * self._deviate(ticket, answer)) for answer in range(answers)
            )
        return self._tickets[key]

    def mean(self, points: int = 20_000) -> float:
        """The law's mean, in tokens."""
        return fmean(self._law(_NORMAL.inv_cdf((i + 0.5) / points)) for i in range(points))

    def _deviate(self, ticket: int, answer: int) -> float:
        uniform = ((counter_seed(self.seed, "length", ticket, answer) >> 12) + 0.5) / 2**52
        return _NORMAL.inv_cdf(uniform)
