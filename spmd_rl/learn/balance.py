"""Which rank trains which sample: equal work for all, from metadata alone.

    ranks, loads = assign(samples, world.size, hidden_size)

Pure and in integers, so that every rank finds the same. The order of the samples breaks ties, never a rank or who came
first: the plan does not know who generated a sample, and neither does the order in which gradients are summed. Left
out: memory (the micro-batches' token budget is a rank's own) and ranks of unequal speed.
"""

import heapq
from bisect import insort
from collections.abc import Sequence

Item = tuple[int, int, int]
"""(ticket, tokens of the prompt, all tokens) of a sample"""
Part = tuple[int, int, tuple[int, ...]]
"""(-sum of the costs, smallest index, all indices): sorted, the heaviest part comes first."""


def assign(samples: Sequence[Item], num_ranks: int, hidden_size: int) -> tuple[list[int], list[int]]:
    """The rank that trains each sample, and each rank's work; a rank computes the prompt of a ticket once.

    Tickets stay whole, or every sample goes where it fits: whichever leaves the slowest rank less to do. Many ranks and
    few tickets ask for the second, and pay for it with prompts that several ranks compute.
    """
    prompts = [workload(prompt, hidden_size) for _, prompt, _ in samples]
    rests = [workload(total, hidden_size) - alone for (_, _, total), alone in zip(samples, prompts, strict=True)]
    tickets = {ticket: alone for (ticket, _, _), alone in zip(samples, prompts, strict=True)}
    for (ticket, _, _), rest in zip(samples, rests, strict=True):
        tickets[ticket] += rest
    whole = dict(zip(tickets, partition(list(tickets.values()), num_ranks), strict=True))
    plans = [
        [whole[ticket] for ticket, _, _ in samples],
        partition([alone + rest for alone, rest in zip(prompts, rests, strict=True)], num_ranks),
    ]

    def loads(ranks: list[int]) -> list[int]:
        sums, known = [0] * num_ranks, set()
        for rank, (ticket, _, _), alone, rest in zip(ranks, samples, prompts, rests, strict=True):
            sums[rank] += rest + (0 if (rank, ticket) in known else alone)
            known.add((rank, ticket))
        return sums

    best = min(plans, key=lambda ranks: max(loads(ranks)))
    return best, loads(best)


def workload(num_tokens: int, hidden_size: int) -> int:
    """Work of one sequence, in units of 2 * hidden_size * layers floating-point operations.

    A decoder layer of width h has about 12 h^2 weights (Kaplan et al., arXiv 2001.08361, table 1), which cost 24 h^2
    operations a token; causal attention adds 2 h for each token it looks back on average, that is 4 h * s / 2. Over a
    sequence of s tokens: 2 h (12 h s + s^2). At h = 2048 these are the weights 24576 s + s^2 known from ROLL.
    """
    return num_tokens * (12 * hidden_size + num_tokens)


def partition(costs: Sequence[int], num_parts: int) -> list[int]:
    """The part, 0 ... `num_parts` - 1, of each item, such that the heaviest part is light.

    The largest differencing method (Karmarkar and Karp, 1982; for many parts see Korf, IJCAI 2009, section 2.3): of all
    partial solutions, the two with the largest difference between their heaviest and lightest part are united, heavy
    parts with light ones, until one solution is left. Costs are positive. Parts are numbered by their first item;
    surplus parts stay empty. O(n log n) for n items, in practice.
    """
    heap: list[tuple[int, int, list[Part]]] = [(-cost, i, [(-cost, i, (i,))]) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, i, a), (_, j, b) = heapq.heappop(heap), heapq.heappop(heap)
        united = _unite(a, b, num_parts)
        lightest = -united[-1][0] if len(united) == num_parts else 0
        heapq.heappush(heap, (united[0][0] + lightest, min(i, j), united))
    result = [0] * len(costs)
    parts = sorted(heap[0][2], key=lambda part: part[1]) if heap else []
    for number, (_, _, items) in enumerate(parts):
        for item in items:
            result[item] = number
    return result


def _unite(a: list[Part], b: list[Part], num_parts: int) -> list[Part]:
    """Two partial solutions as one, heaviest part first. Their empty parts are not written down."""
    if len(a) < len(b):
        a, b = b, a
    if len(b) == 1 and len(a) < num_parts:  # by far the most frequent case
        insort(a, b[0])
        return a
    apart = max(0, num_parts - len(b))  # so many of `a`'s heaviest parts meet an empty part of `b`
    together = [(x[0] + y[0], min(x[1], y[1]), x[2] + y[2]) for x, y in zip(a[apart:], reversed(b), strict=False)]
    lonely = b[: num_parts - len(a)]  # and these of `b` an empty part of `a`
    return sorted(a[:apart] + together + lonely)
