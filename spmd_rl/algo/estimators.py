"""Metrics of several answers to each question: a mean with its interval, pass@k, maj@k.

`pass_at_k` and `maj_at_k` are exact expectations over all subsets of k answers: no draw adds noise.
"""

from collections.abc import Iterable, Sequence
from math import comb, sqrt
from statistics import fmean, stdev

import numpy as np

NORMAL_95 = 1.959964


def half_width(means: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of a mean over questions; None for fewer than two.

    means: of each question, over its answers. Questions, not answers, are the independent draws (clustered standard
    errors; Miller, arXiv 2411.00640). Normal approximation: too narrow for few questions, or nearly equal scores.
    """
    return NORMAL_95 * stdev(means) / sqrt(len(means)) if len(means) > 1 else None


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Return the probability that at least one of k answers, drawn without replacement, is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al., arXiv 2107.03374.
    """
    assert 1 <= k <= num_answers, f"pass@{k} of {num_answers} answers"
    return 1.0 - comb(num_answers - num_right, k) / comb(num_answers, k)


def maj_at_k(votes: Iterable[tuple[str, float]], ks: Sequence[int]) -> list[float]:
    """Return the expected score of the majority answer of k, for each k, over all subsets of k of the n.

    votes: vote and score of each answer; an empty vote abstains. Answers with one vote have its mean score; of tied
    votes each wins with equal probability, and if all abstain the score is 0. (Self-consistency, arXiv 2203.11171.)
    """
    scores: dict[str, list[float]] = {}
    for vote, score in votes:
        scores.setdefault(vote, []).append(score)
    num_silent = len(scores.pop("", ()))
    parties = [(len(found), fmean(found)) for found in scores.values()]
    total, most = num_silent + sum(size for size, _ in parties), max(ks)
    assert most <= total, f"maj@{most} of {total} answers"
    won = np.zeros(most + 1)
    for top in range(1, most + 1):  # the number of votes of those that win
        won += _won(parties, num_silent, top, most)
    return [float(won[k] / comb(total, k)) for k in ks]


def _won(parties: Sequence[tuple[int, float]], num_silent: int, top: int, most: int) -> np.ndarray:
    """Sum the winners' mean scores over all subsets whose winners have `top` votes, by size: float64 [most + 1]."""
    rows = 1 + min(len(parties), most // top)
    ways, sums = np.zeros((rows, most + 1)), np.zeros((rows, most + 1))
    for silent in range(min(num_silent, most) + 1):
        ways[0, silent] = comb(num_silent, silent)
    # Votes are added party by party: `ways[r, u]` counts the choices of u answers among which r parties have `top`
    # votes, `sums[r, u]` adds up these parties' scores.
    for size, score in parties:
        more_ways, more_sums = np.zeros_like(ways), np.zeros_like(sums)
        for count in range(min(size, top, most) + 1):
            wins, factor, end = count == top, float(comb(size, count)), most + 1 - count
            of, to = slice(0, rows - wins), slice(int(wins), rows)
            more_ways[to, count:] += factor * ways[of, :end]
            more_sums[to, count:] += factor * (sums[of, :end] + wins * score * ways[of, :end])
        ways, sums = more_ways, more_sums
    return (sums[1:] / np.arange(1, rows)[:, None]).sum(0)
