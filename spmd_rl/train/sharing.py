"""Prefix sharing: a ticket's samples become a tree of segments, whose common prefixes are computed once.

    tree = share_prefixes(batch)
    logits = model(tree.token_ids, ..., packing=Packing.of(tree.starts, tree.parents))
    logits[tree.gather_index]                # one row for every token of the batch

Answers share their prompt, trajectories their common history, within a micro-batch. This is exact: each segment attends
to one copy of the path before it, where all samples' gradients add up.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from spmd_rl.batch import Batch


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Tokens of a batch, shared ones once; on the batch's device."""

    token_ids: Tensor
    """int64 [F], with F at most T"""
    position_ids: Tensor
    """int64 [F], position within each sample"""
    starts: Tensor
    """int64 [P+1]: first token of each segment, then F"""
    parents: Tensor
    """int64 [P]: the segment that each continues, -1 for none"""
    gather_index: Tensor
    """int64 [T]: index here of each token of the batch"""


@dataclass(frozen=True, slots=True)
class Segment:
    """A span of tokens at equal positions, after equal tokens, of one or more samples."""

    begin: int
    """position of its first token"""
    end: int
    parent: int
    """index of the segment it continues, -1 for none"""
    users: tuple[tuple[int, int], ...]
    """(sample, position at which it leaves the segment), by sample"""

    @property
    def source(self) -> int:
        """First sample with all of the segment."""
        return next(sample for sample, end in self.users if end == self.end)


def share_prefixes(batch: Batch) -> PrefixTree:
    """Return the batch's segments, laid end to end."""
    segments, bounds = prefix_segments(batch), batch.starts.tolist()
    starts = [0, *accumulate(segment.end - segment.begin for segment in segments)]
    index = torch.empty(starts[-1], dtype=torch.int64)
    gather_index = torch.empty(batch.num_tokens, dtype=torch.int64)
    for segment, first in zip(segments, starts, strict=False):
        begin, size = bounds[segment.source] + segment.begin, segment.end - segment.begin
        index[first : first + size] = torch.arange(begin, begin + size)
        for sample, end in segment.users:
            begin, size = bounds[sample] + segment.begin, end - segment.begin
            gather_index[begin : begin + size] = torch.arange(first, first + size)
    device = batch.token_ids.device
    index = index.to(device)
    return PrefixTree(
        token_ids=batch.token_ids[index],
        position_ids=batch.position_ids[index],
        starts=torch.tensor(starts, device=device),
        parents=torch.tensor([segment.parent for segment in segments], dtype=torch.int64, device=device),
        gather_index=gather_index.to(device),
    )


def prefix_segments(batch: Batch) -> list[Segment]:
    """Return the batch's segments by the first sample that contains each, parents first.

    Samples of a ticket share a prefix, which never ends inside an answer. Two samples share their last answer only if
    one continues after it. A segment ends only where samples diverge.
    """
    ids, mask = batch.token_ids.cpu().numpy(), batch.loss_mask.cpu().numpy()
    bounds = batch.starts.tolist()
    by_ticket: dict[int, list[_Row]] = defaultdict(list)
    for sample, ticket in enumerate(batch.keys[:, 0].tolist()):
        span = slice(bounds[sample], bounds[sample + 1])
        by_ticket[ticket].append(_Row(sample, ids[span], mask[span]))
    found: list[Segment] = []
    for rows in by_ticket.values():
        # In sorted order two rows share no more than neighbours between them, so comparing neighbours is enough.
        tree, before = _tree(sorted(rows, key=_Row.bytes)), len(found)
        found += [replace(s, parent=s.parent + before if s.parent >= 0 else -1) for s in tree]
    order = sorted(range(len(found)), key=lambda i: (found[i].users[0][0], found[i].begin))
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    return [replace(found[i], parent=place[found[i].parent]) for i in order]


@dataclass(frozen=True, slots=True)
class _Row:
    sample: int
    ids: np.ndarray
    mask: np.ndarray

    def bytes(self) -> bytes:
        """Return a sort key that makes equal beginnings neighbours."""
        return self.ids.tobytes()

    def last_cut(self, end: int) -> int:
        """Return the last border of a sampled span before `end`; 0 without any."""
        cuts = np.flatnonzero(self.mask[1:end] != self.mask[: end - 1])
        return int(cuts[-1]) + 1 if len(cuts) else 0

    def not_inside_an_answer(self, position: int) -> int:
        """Return `position`, or the beginning of the sampled span it splits."""
        inside = 0 < position < len(self.ids) and self.mask[position - 1] and self.mask[position]
        return self.last_cut(position) if inside else position


def _shared(a: _Row, b: _Row) -> int:
    least = min(len(a.ids), len(b.ids))
    differ = a.ids[:least] != b.ids[:least]
    common = int(differ.argmax()) if differ.any() else least
    if common == len(a.ids) == len(b.ids):
        return min(a.last_cut(common), b.last_cut(common))
    return min(a.not_inside_an_answer(common), b.not_inside_an_answer(common))


def _tree(rows: Sequence[_Row]) -> list[Segment]:
    """Return one ticket's segments, from sorted samples: any two share no more than those between them."""
    shared = [0, *(_shared(a, b) for a, b in pairwise(rows))]  # of each row with the one before it
    segments: list[Segment] = []
    todo = [(0, len(rows), 0, -1)]
    while todo:
        first, last, begin, parent = todo.pop()
        users = sorted((row.sample, len(row.ids)) for row in rows[first:last])
        end, parts = _parting(rows, shared, first, last)
        # The other rows end here, so this is no branch.
        while len(parts) == 1:
            end, parts = _parting(rows, shared, *parts[0])
        if end > begin:
            segments.append(Segment(begin, end, parent, tuple((sample, min(n, end)) for sample, n in users)))
            parent = len(segments) - 1
        todo += [(*part, end, parent) for part in parts]
    return segments


def _parting(rows: Sequence[_Row], shared: Sequence[int], first: int, last: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the end of the common part of rows first : last, and the ranges that diverge there."""
    if last - first == 1:
        return len(rows[first].ids), []
    end = min(shared[first + 1 : last])
    borders = [first, *(i for i in range(first + 1, last) if shared[i] == end), last]
    return end, [part for part in pairwise(borders) if any(len(row.ids) > end for row in rows[slice(*part)])]
