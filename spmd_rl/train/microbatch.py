"""Cut a rank's batch into micro-batches under a token budget. Pure.

The cut depends on samples' keys, lengths and common prefixes alone. The most expensive micro-batch comes first: ranks
synchronise in every layer, so their i-th ones should cost the same.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.batch import Batch, Column, Entries, Ragged
from spmd_rl.train.sharing import PrefixTree, prefix_segments

ATTENTION_TOKENS = 2**14
"""Context length at which attention costs as much as the rest of a layer, about 12 times a width of 1,400"""


def plan(batch: Batch, budget: int) -> list[list[int]]:
    """Return the samples of each micro-batch in (ticket, answer) order: at most `budget` tokens, every sample once.

    A prefix shared within a micro-batch counts once. Samples of a `unit` stay together; a unit above the budget is a
    micro-batch. An empty batch has none.
    """
    keys, units = batch.keys.tolist(), batch.units.tolist()
    paths: list[list[tuple[int, int]]] = [[] for _ in keys]
    for number, segment in enumerate(prefix_segments(batch)):
        for sample, end in segment.users:
            paths[sample].append((number, end - segment.begin))
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    needs: dict[tuple[int, int], dict[Hashable, int]] = defaultdict(dict)
    for sample in sorted(range(len(keys)), key=lambda s: (keys[s], s)):
        unit = keys[sample][0], units[sample]
        members[unit].append(sample)
        for segment, num_tokens in paths[sample]:
            needs[unit][segment] = max(num_tokens, needs[unit].get(segment, 0))
    groups = list(members.values())
    bins = fill(list(needs.values()), budget)
    chosen = [sorted((s for i in one for s in groups[i]), key=lambda s: (keys[s], s)) for one in bins]
    # A stable sort: equal costs keep their order on all ranks.
    return sorted(chosen, key=lambda one: -_cost([paths[s] for s in one]))


def _cost(paths: list[list[tuple[int, int]]]) -> int:
    """Return the cost of samples computed together, as lists of segments (number, tokens); shared ones cost once."""
    begins: dict[int, int] = {}
    longest: dict[int, int] = {}
    for path in paths:
        begin = 0
        for number, num_tokens in path:
            begins[number], longest[number] = begin, max(num_tokens, longest.get(number, 0))
            begin += num_tokens
    return sum(n * (ATTENTION_TOKENS + n // 2 + begins[number]) for number, n in longest.items())


def token_index(batch: Batch, samples: Sequence[int]) -> Tensor:
    """Return the index in `batch` of each token of `batch.select(samples)`, int64."""
    bounds = batch.starts.tolist()
    return torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in samples]).to(batch.token_ids.device)


def fill(items: Sequence[Mapping[Hashable, int]], budget: int) -> list[list[int]]:
    """Return bins of indices of `items`, each put where it fits and adds the fewest tokens, first of equals. items:
    tokens of the segments that each needs; segments shared in a bin count once."""
    bins: list[list[int]] = []
    room: list[int] = []
    held: list[dict[Hashable, int]] = []
    for i, item in enumerate(items):
        costs = [sum(max(0, n - has.get(segment, 0)) for segment, n in item.items()) for has in held]
        fitting = [b for b, cost in enumerate(costs) if cost <= room[b]]
        place = min(fitting, key=lambda b: (costs[b], b), default=len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
            held.append({})
            costs.append(sum(item.values()))
        bins[place].append(i)
        room[place] -= costs[place]
        held[place] |= {segment: max(n, held[place].get(segment, 0)) for segment, n in item.items()}
    return bins


def padded(tree: PrefixTree, multiple: int) -> PrefixTree:
    """Return the tree padded by a last segment to a multiple of tokens."""
    # Kernels are compiled and cached per shape: without this, every number of tokens would add one.
    blank = -len(tree.token_ids) % multiple
    if not blank:
        return tree
    filler = torch.arange(blank, device=tree.token_ids.device)
    return replace(
        tree,
        token_ids=F.pad(tree.token_ids, (0, blank)),
        position_ids=torch.cat([tree.position_ids, filler]),
        starts=torch.cat([tree.starts, tree.starts[-1:] + blank]),
        parents=F.pad(tree.parents, (0, 1), value=-1),
    )


def dummy(like: Batch) -> Batch:
    """Return two tokens of weight 0 with `like`'s columns, for ranks without further micro-batches."""
    device = like.token_ids.device
    columns = {name: _zeros(column, device) for name, column, _ in like.columns()} | {
        "position_ids": torch.arange(2, device=device),
        "keys": torch.tensor([[-1, -1]], device=device),
        "loss_mask": torch.tensor([False, True], device=device),
    }
    return type(like)(torch.tensor([0, 2], device=device), **columns)


def _zeros(column: Column, device: torch.device) -> Entries:
    count = {"token": 2, "sample": 1}[column.per]
    values = torch.zeros(0 if column.ragged else count, *column.shape, dtype=column.dtype, device=device)
    return Ragged(values, torch.zeros(count + 1, dtype=torch.int64, device=device)) if column.ragged else values
