"""Cut a rank's batch into micro-batches under a token budget. Pure: no rank, no collective.

The cut depends on the segments' keys and lengths alone, never on the order in which they lie or on the rank. Left out:
balance between ranks (the learner's).
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.train.sharing import Folded, prompt_lengths


def plan(batch: Batch, budget: int) -> list[list[int]]:
    """Segments of each micro-batch, in (ticket, answer) order: at most `budget` tokens each, every segment once.

    A prompt that several samples of a micro-batch share counts once (`sharing.py`). A segment longer than the budget
    gets a micro-batch of its own. An empty batch gives no micro-batch.
    """
    keys, lengths, prompts = batch.keys.tolist(), batch.starts.diff().tolist(), prompt_lengths(batch).tolist()
    order = sorted(range(batch.num_segments), key=lambda s: (keys[s], s))
    bins = fill([(keys[s][0], prompts[s], lengths[s] - prompts[s]) for s in order], budget)
    return [[order[i] for i in one] for one in bins]


def token_index(batch: Batch, segments: Sequence[int]) -> Tensor:
    """int64 [tokens of `segments`]: where each token of `batch.select(segments)` lies in `batch`."""
    bounds = batch.starts.tolist()
    return torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in segments]).to(batch.token_ids.device)


def fill(samples: Sequence[tuple[int, int, int]], budget: int) -> list[list[int]]:
    """First-fit: indices of `samples`, each put where its ticket already is, or else into the first bin with room.

    samples: (ticket, tokens of the prompt, tokens after it). A ticket's prompt takes room once in a bin.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    held: list[set[int]] = []
    for i, (ticket, prompt, rest) in enumerate(samples):
        costs = [rest if ticket in tickets else prompt + rest for tickets in held]
        fitting = [b for b, cost in enumerate(costs) if cost <= room[b]]
        place = min(fitting, key=lambda b: (ticket not in held[b], b), default=len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
            held.append(set())
            costs.append(prompt + rest)
        bins[place].append(i)
        held[place].add(ticket)
        room[place] -= costs[place]
    return bins


def rounded(folded: Folded, multiple: int) -> Folded:
    """The same tokens with a last segment that fills them up to a multiple of `multiple`.

    Kernels are compiled and kept per shape: with every number of tokens a shape of its own, they would pile up.
    """
    blank = -len(folded.token_ids) % multiple
    if not blank:
        return folded
    filler = torch.arange(blank, device=folded.token_ids.device)
    return replace(
        folded,
        token_ids=F.pad(folded.token_ids, (0, blank)),
        position_ids=torch.cat([folded.position_ids, filler]),
        starts=torch.cat([folded.starts, folded.starts[-1:] + blank]),
        parents=F.pad(folded.parents, (0, 1), value=-1),
    )


def dummy(like: Batch) -> Batch:
    """Two tokens of weight 0, with the columns of `like`: what a rank runs while others still have micro-batches."""
    columns = {
        field.name: torch.zeros(2, dtype=column.dtype, device=column.device)
        for field in fields(like)
        if (column := getattr(like, field.name)) is not None
    }
    device = like.token_ids.device
    columns |= {
        "position_ids": torch.arange(2, device=device),
        "starts": torch.tensor([0, 2], device=device),
        "keys": torch.tensor([[-1, -1]], device=device),
        "loss_mask": torch.tensor([False, True], device=device),
    }
    return Batch(**columns)
