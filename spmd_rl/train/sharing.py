"""One prompt, computed once: the answers of a group share the forward and backward pass of what they have in common.

    folded = fold(batch)                     # before the model
    logits = model(folded.token_ids, ..., packing=Packing.of(folded.starts, folded.parents))
    logits[folded.places]                    # every token of the batch at its place again

A fold is a re-indexing and no approximation: a prompt's hidden states do not depend on what follows, so each answer
attends to one copy of them, with its positions going on from there, and gradients of all answers meet in that copy.
Samples of a group may lie in different micro-batches or on different ranks: what lies together shares.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.batch import Batch


@dataclass(frozen=True, slots=True)
class Folded:
    """A batch's tokens without repeated prompts."""

    token_ids: Tensor
    """int64 [F]"""
    position_ids: Tensor
    """int64 [F]"""
    starts: Tensor
    """int64 [P+1]: first token of each segment, then F"""
    parents: Tensor
    """int64 [P]: the segment that a segment continues, -1 for none"""
    places: Tensor
    """int64 [T]: where each token of the batch stands"""


def fold(batch: Batch) -> Folded:
    """Each group of segments of one ticket that begin with the same prompt becomes that prompt and its continuations.

    The prompt is what precedes a sample's first sampled token. A segment that shares with nobody stays whole.
    """
    bounds, tickets = batch.starts.tolist(), batch.keys[:, 0].tolist()
    prompts = prompt_lengths(batch).tolist()
    ids = batch.token_ids.tolist()
    heads = [(ticket, *ids[b : b + n]) for ticket, b, n in zip(tickets, bounds, prompts, strict=False)]
    counts: dict[tuple[int, ...], int] = {}
    for head in heads:
        counts[head] = counts.get(head, 0) + 1
    segments: list[range] = []  # of the batch's tokens, laid end to end
    parents: list[int] = []
    starts, places = [0], torch.empty(batch.num_tokens, dtype=torch.int64)
    known: dict[tuple[int, ...], int] = {}

    def place(run: range, parent: int) -> None:
        segments.append(run)
        parents.append(parent)
        places[run.start : run.stop] = torch.arange(starts[-1], starts[-1] + len(run))
        starts.append(starts[-1] + len(run))

    for segment, (head, n) in enumerate(zip(heads, prompts, strict=True)):
        begin, end = bounds[segment], bounds[segment + 1]
        if counts[head] == 1 or n == 0:
            place(range(begin, end), -1)
            continue
        if head not in known:
            known[head] = len(segments)
            place(range(begin, begin + n), -1)
        first = starts[known[head]]
        places[begin : begin + n] = torch.arange(first, first + n)
        place(range(begin + n, end), known[head])
    index = torch.cat([torch.arange(run.start, run.stop) for run in segments])
    device = batch.token_ids.device
    index = index.to(device)
    return Folded(
        token_ids=batch.token_ids[index],
        position_ids=batch.position_ids[index],
        starts=torch.tensor(starts, device=device),
        parents=torch.tensor(parents, device=device),
        places=places.to(device),
    )


def prompt_lengths(batch: Batch) -> Tensor:
    """int64 [S]: tokens of each segment before its first sampled one (0 for a segment without any)."""
    sampled = batch.loss_mask.nonzero().squeeze(-1)
    first = torch.searchsorted(sampled, batch.starts[:-1])
    padded = torch.cat([sampled, batch.starts[-1:]])[first]
    return torch.where(padded < batch.starts[1:], padded - batch.starts[:-1], 0)
