"""The plan of a step: every cross-sample number, over the global batch, and which data shard trains which sample.

All ranks hold the metadata of all samples (`table.ANSWER`), so each computes the same advantages, token weights and
distribution of the samples over the data shards, in (ticket, answer) order: nothing here meets other ranks, and
`transfer.py` carries the plan out. Counts and means are over answers, never over the segments that some have.

Shards get equal work, by integers alone. The order of the samples breaks ties, never a rank or who came first: the plan
does not know who generated a sample, and neither does the order in which gradients are summed. Left out: memory (the
micro-batches' token budget is a rank's own) and ranks of unequal speed.
"""

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.data.seeds import counter_seed
from spmd_rl.distributed import DataShard
from spmd_rl.learn.advantages import Credit, Key, Metadata, keys
from spmd_rl.types import Group, Sample


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank computes alike from the metadata of a step. One row per sample that trains, in order; n rows."""

    step: int
    keys: np.ndarray
    """int64 [n, 2]: (ticket, answer)"""
    units: np.ndarray
    """int64 [n]: see `Batch.units`"""
    lengths: np.ndarray
    """int64 [n]: tokens of the sample, prompt included"""
    num_prompt_tokens: np.ndarray
    """int64 [n]: tokens before the first sampled one"""
    num_sampled: np.ndarray
    """int64 [n]: tokens that the policy sampled"""
    trajectories: np.ndarray
    """int64 [n]: equal numbers mark the segments of an answer"""
    src_rank: np.ndarray
    """int64 [n]: rank that generated the sample"""
    data_rank: np.ndarray
    """int64 [n]: data shard of the policy that trains it"""
    num_runs: np.ndarray
    """int64 [n]: runs of sampled tokens that are credited as one: the whole sample, or each turn of an agent"""
    turns: np.ndarray
    """int64 [r]: of these runs, sample by sample; equal numbers mark one turn, or one answer"""
    run_lengths: np.ndarray
    """int64 [r]: sampled tokens"""
    advantages: np.ndarray
    """float64 [r]: mean advantage of its tokens; before a token-level estimator, the reward of its turn"""
    weights: np.ndarray
    """float64 [n]: weight of each token of the sample in its mini-batch"""
    minibatches: np.ndarray
    """int64 [n]: number of the optimizer step that uses the sample; ascending"""
    masked: tuple[tuple[Key, str], ...]
    """samples of answers that have a score and do not train, each with the reason"""
    left_out: float
    """the share of the scored answers that do not train"""
    stale: bool
    """some sample holds tokens of an older policy version"""
    balance: float
    """work of the slowest rank over the mean, summed over the optimizer steps; 1 is perfect"""
    mean_reward: float
    """of the shaped scores; 0 without any"""

    @property
    def num_answers(self) -> int:
        """How many answers train."""
        return len(np.unique(self.trajectories))

    def metrics(self) -> dict[str, float]:
        """How the work is spread, and how much of what was collected is of use."""
        return {"actor/balance": self.balance, "actor/left_out": self.left_out}

    def samples_of(self, groups: Iterable[Group], rank: int) -> list[Sample]:
        """Those of a rank's own samples that train, in order."""
        samples = {sample.key: sample for group in groups for sample in group.samples}
        keys = map(tuple, self.keys[self.src_rank == rank].tolist())
        return [samples[key] for key in keys if key in samples]  # all are, if the ranks agree

    def visits(self, num_epochs: int, seed: int) -> list[int]:
        """The mini-batch of each optimizer step: all that hold a sample, in order, and then in a random order of each
        further epoch's own. seed: the run's."""
        used = np.unique(self.minibatches).tolist()
        orders = [
            sorted(used, key=lambda number, e=epoch: counter_seed("epoch", seed, self.step, e, number))
            for epoch in range(1, num_epochs)
        ]
        return [number for order in (used, *orders) for number in order]

    def columns(self) -> tuple[Any, ...]:
        """Everything: what ranks compare."""
        return tuple([getattr(self, name) for name in self.__slots__])

    def with_advantages(self, batches: Sequence[Batch], data: DataShard) -> "Plan":
        """[all] Return the plan with each run's mean advantage, as the batches have it now.

        batches: this rank's mini-batches. data: its share of the policy's data.
        """
        here = (self.data_rank == data.rank).repeat(self.num_runs)
        lengths = self.run_lengths[here]
        runs = np.arange(len(lengths)).repeat(lengths)
        tokens = [batch.advantages[batch.sampled.index].double().numpy() for batch in batches]
        sums = np.bincount(runs, np.concatenate(tokens), len(lengths))
        shards = data.gather("prepare: advantages", (sums / lengths).tolist())  # [all]
        advantages = np.empty_like(self.advantages)
        for shard, means in enumerate(shards):
            advantages[(self.data_rank == shard).repeat(self.num_runs)] = means
        return replace(self, advantages=advantages)

    def elsewhere(self, data: DataShard, hidden_size: int) -> "Plan":
        """The same plan for a role with other data shards: only `data_rank` differs. hidden_size: the role's."""
        bounds = self.minibatches.searchsorted(np.arange(self.minibatches.max(initial=0) + 2)).tolist()
        samples = np.stack((self.keys[:, 0], self.units, self.num_prompt_tokens, self.lengths), axis=1)
        return replace(self, data_rank=assign(samples, bounds, data.size, hidden_size)[0])


class Shares(NamedTuple):
    """Over what the samples of a step are spread."""

    num_updates: int
    """optimizer steps, between which the tickets are divided in order"""
    num_shards: int
    """data shards of the policy"""
    hidden_size: int
    """of the policy: from it follows the work that a sample makes"""


def plan(step: int, found: Credit, shares: Shares, aggregate: Callable[[Tensor], Tensor]) -> Plan:
    """The plan that spreads the answers of a step that train over optimizer steps and data shards.

    aggregate: weighs the answers of an optimizer step by their lengths; one of `algo.AGGREGATIONS`.
    """
    data, weights = found.data, found.weights.clone()
    trains = np.ones(len(data.answers), np.bool_)
    trains[list(found.masked)] = False
    minibatches = divide(data.answers["ticket"][trains], shares.num_updates)
    bounds_in = partial(np.searchsorted, v=np.arange(shares.num_updates + 1))
    for begin, end in pairwise(bounds_in(minibatches).tolist()):
        weights[begin:end] *= aggregate(data.lengths[trains][begin:end])
    kept = trains[data.owners]
    samples, owners = data.samples[kept], (trains.cumsum() - 1)[data.owners[kept]]
    runs, kept_runs = found.runs, kept.repeat(found.runs.counts)
    rows = np.stack([samples[name] for name in ("ticket", "unit", "num_prompt_tokens", "num_tokens")], axis=1)
    bounds = bounds_in(minibatches[owners]).tolist()
    data_rank, imbalance = assign(rows, bounds, shares.num_shards, shares.hidden_size)
    left_out = data.num_excluded + len(found.masked)
    return Plan(
        step=step,
        keys=np.stack((samples["ticket"], samples["answer"]), axis=1),
        units=samples["unit"].astype(np.int64),
        lengths=samples["num_tokens"].astype(np.int64),
        num_prompt_tokens=samples["num_prompt_tokens"].astype(np.int64),
        num_sampled=samples["num_answer_tokens"].astype(np.int64),
        trajectories=owners,
        src_rank=samples["rank"].astype(np.int64),
        data_rank=data_rank,
        num_runs=runs.counts[kept],
        turns=runs.turns[kept_runs],
        run_lengths=runs.lengths[kept_runs],
        advantages=found.advantages[runs.turns[kept_runs]],
        weights=weights.numpy()[owners],
        minibatches=minibatches[owners],
        masked=data.excluded + _reasons(data, found.masked),
        left_out=left_out / max(1, data.num_excluded + len(trains)),
        stale=bool((samples["lag"] > 0).any()),
        balance=imbalance,
        mean_reward=float(found.scores.mean()) if len(found.scores) else 0.0,
    )


def _reasons(data: Metadata, masked: Mapping[int, str]) -> tuple[tuple[Key, str], ...]:
    """Why the samples of these answers do not train."""
    rows = np.flatnonzero(np.isin(data.owners, list(masked))) if masked else np.empty(0, np.int64)
    reasons = [masked[owner] for owner in data.owners[rows].tolist()]
    return tuple(zip(keys(data.samples[rows]), reasons, strict=True))


Count = TypeVar("Count", int, np.ndarray)
Part = tuple[int, int, tuple[int, ...]]
"""(-sum of the costs, smallest index, all indices): sorted, the heaviest part comes first."""
Solution = tuple[int, int, list[Part]]
"""(lightest - heaviest part, smallest index, parts, heaviest first): sorted, the largest difference comes first."""
WORTH_SPREADING = 100
"""Units are spread to win one part in so many of all work, not for less."""


def divide(tickets: np.ndarray, num_updates: int) -> np.ndarray:
    """The mini-batch of each sample: tickets (int64 [n], those of one side by side) in order, as evenly as they go."""
    if num_updates == 1:
        return np.zeros(len(tickets), np.int64)
    places = begins(tickets).cumsum() - 1
    return places * num_updates // (places[-1:] + 1)


def assign(samples: np.ndarray, bounds: Sequence[int], num_shards: int, hidden_size: int) -> tuple[np.ndarray, float]:
    """The data shard of each sample, int64 [n], and the work of the slowest over the mean, summed over mini-batches.

    samples: int64 [n, 4], see `spread`. bounds: where each mini-batch begins, and n. Every mini-batch is balanced by
    itself: ranks wait for each other at the end of each.
    """
    shards = np.zeros(len(samples), np.int64)
    if num_shards == 1:
        return shards, 1.0
    slowest = total = 0
    for begin, end in pairwise(bounds):
        shards[begin:end], loads = spread(samples[begin:end], num_shards, hidden_size)
        slowest, total = slowest + max(loads), total + sum(loads)
    return shards, slowest * num_shards / total if total else 1.0


def spread(samples: np.ndarray, num_shards: int, hidden_size: int) -> tuple[np.ndarray, list[int]]:
    """The shard that trains each sample, int64 [n], and each shard's work; it computes the prompt of a ticket once.

    samples: int64 [n, 4], (ticket, unit, tokens of the prompt, all tokens); those of a ticket are neighbours, and begin
    with the same prompt.

    Tickets stay whole, or every unit goes where it fits: whichever leaves the slowest shard less to do. Many shards and
    few tickets ask for the second, and pay for it with prompts that several shards compute. It is tried only where
    whole tickets leave more than one part in `WORTH_SPREADING` to win: there are many more samples than tickets to walk
    over.
    """
    tickets, units, prompts, totals = samples.T
    first = begins(tickets)
    groups = first.cumsum() - 1
    shared = workload(prompts[first], hidden_size)  # of each ticket's prompt
    own = workload(totals, hidden_size) - shared[groups]
    costs = _sums(groups, own, len(shared)) + shared
    whole = np.array(partition(costs.tolist(), num_shards), np.int64)
    work = _sums(whole, costs, num_shards).tolist()
    to_win = max(work) * num_shards - sum(work)
    if to_win > max(sum(work) // WORTH_SPREADING, min(shared.tolist(), default=0)):  # else a prompt more cannot pay
        width = 1 + units.max(initial=0)
        names, number = np.unique(groups * width + units, return_inverse=True)
        alone = _sums(number, own, len(names)) + shared[names // width]
        apart = np.array(partition(alone.tolist(), num_shards), np.int64)[number]
        shards, prompts_of = np.divmod(np.unique(apart * len(shared) + groups), len(shared))  # each once on a shard
        apart_work = (_sums(apart, own, num_shards) + _sums(shards, shared[prompts_of], num_shards)).tolist()
        if max(apart_work) < max(work):
            return apart, apart_work
    return whole[groups], work


def _sums(places: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """The sum of the values at each place below `size`; in integers."""
    sums = np.zeros(size, np.int64)
    np.add.at(sums, places, values)
    return sums


def begins(tickets: np.ndarray) -> np.ndarray:
    """Where another ticket begins: bool [n] for tickets [n], those of one side by side."""
    first = np.ones(len(tickets), np.bool_)
    np.not_equal(tickets[1:], tickets[:-1], out=first[1:])
    return first


def workload(num_tokens: Count, hidden_size: int) -> Count:
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
    ascending = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)[::-1]
    singles = [(-costs[i], i, (i,)) for i in ascending]  # partial solutions of one item: the heaviest is the last
    solutions: list[Solution] = []

    def take() -> tuple[int, list[Part]]:
        """Remove the solution with the largest difference; return its smallest index and its parts."""
        if solutions and not (singles and singles[-1] < solutions[0]):
            return heapq.heappop(solutions)[1:]
        part = singles.pop()
        return part[1], [part]

    while len(singles) + len(solutions) > 1:
        if len(singles) >= num_parts and not (solutions and solutions[0] < singles[-num_parts]):
            # items that come next, one for each part: as long as a part is empty, the largest difference is theirs
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
    """Two partial solutions as one, heaviest part first. Their empty parts are not written down."""
    if len(a) < len(b):
        a, b = b, a
    if len(b) == 1:  # by far the most frequent case
        insort(a, b[0] if len(a) < num_parts else _add(a.pop(), b[0]))
        return a
    apart = num_parts - len(b)  # so many of `a`'s heaviest parts meet an empty part of `b`
    together = [_add(x, y) for x, y in zip(a[apart:], reversed(b), strict=False)]
    lonely = b[: num_parts - len(a)]  # and these of `b` an empty part of `a`
    return sorted(a[:apart] + together + lonely)


def _add(a: Part, b: Part) -> Part:
    return a[0] + b[0], a[1] if a[1] < b[1] else b[1], a[2] + b[2]
