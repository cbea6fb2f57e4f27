"""Cut a rank's batch into micro-batches under a token budget. Pure: no rank, no collective.

The cut depends on the segments' keys and lengths alone, never on the order in which they lie or on the rank. Left out:
balance between ranks (the learner's).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.batch import Batch


def plan(batch: Batch, budget: int) -> list[list[int]]:
    """Segments of each micro-batch, in (ticket, answer) order: at most `budget` tokens each, every segment once.

    A segment longer than the budget gets a micro-batch of its own. An empty batch gives no micro-batch.
    """
    bounds, keys = batch.starts.tolist(), batch.keys.tolist()
    order = sorted(range(batch.num_segments), key=lambda s: (keys[s], s))
    bins = fill([bounds[s + 1] - bounds[s] for s in order], budget)
    return [[order[i] for i in one] for one in bins]


def token_index(batch: Batch, segments: Sequence[int]) -> Tensor:
    """int64 [tokens of `segments`]: where each token of `batch.select(segments)` lies in `batch`."""
    bounds = batch.starts.tolist()
    return torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in segments]).to(batch.token_ids.device)


def fill(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit: indices of `lengths`, each put into the first bin that still has room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i, length in enumerate(lengths):
        place = next((b for b, left in enumerate(room) if length <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(i)
        room[place] -= length
    return bins


def rounded(token_ids: Tensor, positions: Tensor, starts: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same tokens with a last segment that fills them up to a multiple of `multiple`; int64 [T], [T], [S+1].

    Kernels are compiled and kept per shape: with every number of tokens a shape of its own, they would pile up.
    """
    blank = -len(token_ids) % multiple
    if not blank:
        return token_ids, positions, starts
    filler = torch.arange(blank, device=token_ids.device)
    ends = torch.cat([starts, starts[-1:] + blank])
    return torch.cat([token_ids, torch.zeros_like(filler)]), torch.cat([positions, filler]), ends


def dummy(like: Batch) -> Batch:
    """Two tokens of weight 0, with the columns of `like`: what a rank runs while others still have micro-batches."""
    device = like.token_ids.device
    zeros = torch.zeros(2, device=device)
    integers = torch.zeros(2, dtype=torch.int64, device=device)
    return Batch(
        token_ids=integers,
        position_ids=torch.arange(2, device=device),
        starts=torch.tensor([0, 2], device=device),
        parents=torch.tensor([-1], device=device),
        keys=torch.tensor([[-1, -1]], device=device),
        loss_mask=torch.tensor([False, True], device=device),
        rollout_logprobs=zeros,
        versions=integers,
        advantages=zeros,
        weights=zeros,
        old_logprobs=None if like.old_logprobs is None else zeros,
        ref_logprobs=None if like.ref_logprobs is None else zeros,
    )
