"""Metrics of several answers to each question: a mean with its interval, pass@k, maj@k.

Pure functions over plain numbers. `pass_at_k` and `maj_at_k` are exact expectations over all subsets of k answers, so
that no draw of a subset adds noise; a test compares them with all subsets.
"""

from collections.abc import Iterable, Sequence
from math import comb, sqrt
from statistics import fmean, stdev

import numpy as np

NORMAL_95 = 1.959964
"""The 97.5 % quantile of the normal distribution"""


def half_width(means: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of a mean over questions; None of fewer than two.

    means: of each question, over its answers. Questions are the independent draws, not answers, which share a question
    (clustered standard errors; Miller, arXiv 2411.00640). Normal approximation: of few questions, or of scores that are
    nearly all alike, it is too narrow.
    """
    return NORMAL_95 * stdev(means) / sqrt(len(means)) if len(means) > 1 else None


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Probability that of k answers, drawn of n without replacement, one at least is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al., arXiv 2107.03374.
    """
    assert 1 <= k <= num_answers, f"pass@{k} of {num_answers} answers"
    return 1.0 - comb(num_answers - num_right, k) / comb(num_answers, k)


def maj_at_k(votes: Iterable[tuple[str, float]], ks: Sequence[int]) -> list[float]:
    """Expected score of the answer that most of k answers agree on, for each k, over all subsets of k of the n.

    votes: of each answer what it votes for, and its score; an empty vote abstains. Answers with one vote have its mean
    score; of votes that tie, each wins with equal probability, and where all abstain the score is 0. (Self-consistency,
    arXiv 2203.11171.)
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
    """Sum of the winners' mean scores over all subsets whose winners have `top` votes, by size: float64 [most + 1].

    Votes are added party by party: `ways[r, u]` counts the choices of u answers among which r parties have `top` votes,
    `sums[r, u]` adds up these parties' scores.
    """
    rows = 1 + min(len(parties), most // top)
    ways, sums = np.zeros((rows, most + 1)), np.zeros((rows, most + 1))
    for silent in range(min(num_silent, most) + 1):
        ways[0, silent] = comb(num_silent, silent)
    for size, score in parties:
        more_ways, more_sums = np.zeros_like(ways), np.zeros_like(sums)
        for count in range(min(size, top, most) + 1):
            wins, factor, end = count == top, float(comb(size, count)), most + 1 - count
            of, to = slice(0, rows - wins), slice(int(wins), rows)
            more_ways[to, count:] += factor * ways[of, :end]
            more_sums[to, count:] += factor * (sums[of, :end] + wins * score * ways[of, :end])
        ways, sums = more_ways, more_sums
    return (sums[1:] / np.arange(1, rows)[:, None]).sum(0)
