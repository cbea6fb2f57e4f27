"""Assignment of samples to data shards, so that the slowest shard has the least work.

Work is counted in integers and ties go by the samples' order, so the order of gradient sums does not depend on which
rank generated a sample. Memory (micro-batches have a token budget) and unequal ranks are not considered.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

Count = TypeVar("Count", int, np.ndarray)
Part = tuple[int, int, tuple[int, ...]]
"""(-sum of the costs, smallest index, all indices); sorts by falling cost."""
Solution = tuple[int, int, list[Part]]
"""(lightest - heaviest part, smallest index, parts by falling cost); sorts by falling difference."""
WORTH_SPREADING = 100
"""A ticket's units are separated only if that saves more than a hundredth of all work."""


def divide(tickets: np.ndarray, num_updates: int) -> np.ndarray:
    """Return the mini-batch of each sample, as evenly as possible. tickets: int64 [n], equal ones adjacent."""
    if num_updates == 1:
        return np.zeros(len(tickets), np.int64)
    places = begins(tickets).cumsum() - 1
    return places * num_updates // (places[-1:] + 1)


def assign(samples: np.ndarray, bounds: Sequence[int], num_shards: int, hidden_size: int) -> tuple[np.ndarray, float]:
    """Return the data shard of each sample, int64 [n], and the slowest shard's work over the mean.

    samples: int64 [n, 4], see `spread`. bounds: begin of each mini-batch, and n.
    """
    shards = np.zeros(len(samples), np.int64)
    if num_shards == 1:
        return shards, 1.0
    # Mini-batches are balanced one by one, since ranks wait for each other at the end of each.
    slowest = total = 0
    for begin, end in pairwise(bounds):
        shards[begin:end], loads = spread(samples[begin:end], num_shards, hidden_size)
        slowest, total = slowest + max(loads), total + sum(loads)
    return shards, slowest * num_shards / total if total else 1.0


def spread(samples: np.ndarray, num_shards: int, hidden_size: int) -> tuple[np.ndarray, list[int]]:
    """Return the shard that trains each sample, int64 [n], and each shard's work, which counts a ticket's prompt once.

    samples: int64 [n, 4], (ticket, unit, tokens of the prompt, all tokens), by ticket; its samples share the prompt.
    Tickets stay whole, unless placing units one by one leaves the slowest shard less work.
    """
    # Many shards and few tickets need the finer units, although several shards then compute the same prompt. Units are
    # tried only if whole tickets leave more than one part in `WORTH_SPREADING` to gain, because there are many more
    # samples than tickets.
    tickets, units, prompts, totals = samples.T
    first = begins(tickets)
    groups = first.cumsum() - 1
    shared = workload(prompts[first], hidden_size)  # of each ticket's prompt
    own = workload(totals, hidden_size) - shared[groups]
    costs = _sums(groups, own, len(shared)) + shared
    whole = np.array(partition(costs.tolist(), num_shards), np.int64)
    work = _sums(whole, costs, num_shards).tolist()
    to_win = max(work) * num_shards - sum(work)
    # A gain below the cheapest prompt cannot pay for computing it twice.
    if to_win > max(sum(work) // WORTH_SPREADING, min(shared.tolist(), default=0)):
        width = 1 + units.max(initial=0)
        names, number = np.unique(groups * width + units, return_inverse=True)
        alone = _sums(number, own, len(names)) + shared[names // width]
        apart = np.array(partition(alone.tolist(), num_shards), np.int64)[number]
        # A ticket's prompt counts once on each shard.
        shards, prompts_of = np.divmod(np.unique(apart * len(shared) + groups), len(shared))
        apart_work = (_sums(apart, own, num_shards) + _sums(shards, shared[prompts_of], num_shards)).tolist()
        if max(apart_work) < max(work):
            return apart, apart_work
    return whole[groups], work


def _sums(places: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, places, values)
    return sums


def begins(tickets: np.ndarray) -> np.ndarray:
    """Return a mask of the samples that begin a ticket, bool [n]."""
    first = np.ones(len(tickets), np.bool_)
    np.not_equal(tickets[1:], tickets[:-1], out=first[1:])
    return first


def workload(num_tokens: Count, hidden_size: int) -> Count:
    """Return the work of one sequence, in units of 2 * hidden_size * layers floating-point operations.

    A decoder layer of width h has about 12 h^2 weights (Kaplan et al., arXiv 2001.08361, table 1), 24 h^2 operations a
    token; causal attention adds on average 4 h * s / 2. Over s tokens: 2 h (12 h s + s^2). At h = 2048 these are ROLL's
    weights 24576 s + s^2.
    """
    return num_tokens * (12 * hidden_size + num_tokens)


def partition(costs: Sequence[int], num_parts: int) -> list[int]:
    """Return the part, 0 ... `num_parts` - 1, of each item, such that the heaviest part is light.

    The largest differencing method (Karmarkar and Karp, 1982; for many parts see Korf, IJCAI 2009, section 2.3): unite
    the two partial solutions with the largest difference between heaviest and lightest part, heavy parts with light
    ones, until one is left. Costs are positive. Parts are numbered by their first item; surplus parts stay empty. O(n
    log n) in practice.
    """
    ascending = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)[::-1]
    # Each item alone is a partial solution, the heaviest one last.
    singles = [(-costs[i], i, (i,)) for i in ascending]
    solutions: list[Solution] = []

    def take() -> tuple[int, list[Part]]:
        if solutions and not (singles and singles[-1] < solutions[0]):
            return heapq.heappop(solutions)[1:]
        part = singles.pop()
        return part[1], [part]

    while len(singles) + len(solutions) > 1:
        if len(singles) >= num_parts and not (solutions and solutions[0] < singles[-num_parts]):
            # Items that come next, one for each part: as long as a part is empty, the largest difference is theirs.
            parts = singles[: -num_parts - 1 : -1]
            del singles[-num_parts:]
            first = min([part[1] for part in parts])
        else:
            (i, a), (j, b) = take(), take()
            first, parts = min(i, j), _unite(a, b, num_parts)
        lightest = parts[-1][0] if len(parts) == num_parts else 0
        heapq.heappush(solutions, (parts[0][0] - lightest, first, parts))
    result = [0] * len(costs)
    parts = sorted(take()[1], key=lambda part: part[1]) if costs else []
    for number, (_, _, items) in enumerate(parts):
        for item in items:
            result[item] = number
    return result


def _unite(a: list[Part], b: list[Part], num_parts: int) -> list[Part]:
    if len(a) < len(b):
        a, b = b, a
    # By far the most frequent case.
    if len(b) == 1:
        insort(a, b[0] if len(a) < num_parts else _add(a.pop(), b[0]))
        return a
    # The heaviest parts of `a` are united with empty parts of `b`.
    apart = num_parts - len(b)
    together = [_add(x, y) for x, y in zip(a[apart:], reversed(b), strict=False)]
    # The remaining parts of `b` are united with empty parts of `a`.
    lonely = b[: num_parts - len(a)]
    return sorted(a[:apart] + together + lonely)


def _add(a: Part, b: Part) -> Part:
    return a[0] + b[0], a[1] if a[1] < b[1] else b[1], a[2] + b[2]
