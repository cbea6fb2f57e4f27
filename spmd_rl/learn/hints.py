"""Hints: extra text in a teacher's prompt. Made before samples are redistributed: prompts are known only there."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from spmd_rl.batch import Batch, Ragged, as_tensor, bounds_of, positions
from spmd_rl.types import Group, Message, Prompt, TextPart

Render = Callable[[Sequence[Message]], array]


class Hints:
    """Prompts with hints, by domain."""

    def __init__(self, templates: Mapping[str, str | None], render: Render) -> None:
        """templates: '' is for every domain without a template; None: no hint."""
        self._templates, self._render = dict(templates), render

    def __call__(self, batch: Batch, groups: Iterable[Group]) -> Ragged:
        """Return the teacher's prompt of each sample as token ids; empty if it is the policy's."""
        prompts = {group.ticket: group.prompt for group in groups}
        found = {ticket: self._ids(prompts[ticket]) for ticket in set(batch.keys[:, 0].tolist())}
        lists = [found[ticket] for ticket in batch.keys[:, 0].tolist()]
        values = np.concatenate([np.zeros(0, np.int32), *(np.asarray(ids, np.int32) for ids in lists)])
        return Ragged(torch.from_numpy(values), bounds_of(as_tensor([len(ids) for ids in lists])))

    def _ids(self, prompt: Prompt) -> array:
        template = self._templates.get(prompt.domain, self._templates.get(""))
        if template is None:
            return array("i")
        # In this order: the answer may contain a backslash and an n, as in \neq.
        hint = template.replace("\\n", "\n").replace("{answer}", prompt.ground_truth)
        *before, last = prompt.messages
        parts = last.content if isinstance(last.content, tuple) else (TextPart(last.content),)
        return self._render([*before, Message(last.role, (*parts, TextPart(f"\n\n{hint}")))])


def with_hints(batch: Batch) -> Batch:
    """Return the answers with hints in their prompts; of the token columns only the mask is kept."""
    bounds, own = batch.starts.tolist(), batch.hints.offsets.tolist()
    runs, masks = [batch.token_ids[:0]], [batch.loss_mask[:0]]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        run, mask = batch.token_ids[begin:end], batch.loss_mask[begin:end]
        ids = batch.hints.values[own[number] : own[number + 1]]
        if len(ids) and mask.any():
            first = int(mask.int().argmax())
            run, mask = torch.cat([ids.long(), run[first:]]), torch.cat([mask.new_zeros(len(ids)), mask[first:]])
        runs.append(run)
        masks.append(mask)
    starts = bounds_of(as_tensor([len(run) for run in runs[1:]]))
    tokens, mask = torch.cat(runs), torch.cat(masks)
    zeros = torch.zeros(len(tokens))
    shown = Batch(starts, batch.keys, batch.units, tokens, positions(starts), mask, zeros, zeros.int())
    shown.pictures, shown.picture_sizes = batch.pictures, batch.picture_sizes
    return shown


def at_answers(batch: Batch, shown: Batch, logprobs: Tensor, *lists: Ragged) -> tuple[Tensor | Ragged, ...]:
    """Move columns of the teacher's batch `shown` to the sampled tokens of the policy's batch. Lists of a column have
    one length.
    """
    own = torch.full((batch.num_tokens,), torch.nan)
    own[batch.sampled.index] = logprobs[shown.sampled.index]
    counts = torch.zeros_like(batch.loss_mask, dtype=torch.int64)
    counts[batch.sampled.index] = lists[0].offsets.diff()[shown.sampled.index]
    return own, *(Ragged(some.values, bounds_of(counts)) for some in lists)
