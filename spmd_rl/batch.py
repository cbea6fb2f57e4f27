"""The packed columnar `Batch`: the tensors of many samples laid end to end, without padding.

A *segment* is a run of tokens that attends causally to itself: a sample, prompt and answer. That the samples of a group
begin with the same prompt is used where they are computed (`train/sharing.py`), not here. Two kinds of columns:

    tokens    T    one entry per token
    segments  S    one entry per segment; segment s owns tokens [starts[s], starts[s+1])

Left out: padding (a backend's own affair) and anything that is not a tensor.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from spmd_rl.types import Sample


@dataclass(slots=True)
class Batch:
    """Samples of one rank, packed. All tensors live on one device; log-probabilities are natural logarithms."""

    token_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T]: 0, 1, ... within each root-to-segment path"""
    starts: Tensor
    """int64 [S+1]: first token of each segment, then T"""
    keys: Tensor
    """int64 [S, 2]: (ticket, answer) of the sample; (-1, -1) for a filler"""
    loss_mask: Tensor
    """bool [T]: the token was sampled by the policy (its logprob comes from the token before it)"""
    rollout_logprobs: Tensor
    """float32 [T]: the engine's logprob of each sampled token, 0 elsewhere"""
    versions: Tensor
    """int64 [T]: policy version that sampled the token, -1 elsewhere"""
    advantages: Tensor
    """float32 [T]: 0 outside the loss mask"""
    weights: Tensor
    """float32 [T]: weight of the token's loss; the weights of the *global* batch make the aggregation (token-mean:
    1 / global token count), so that a sum over any split of the batch is the loss"""
    old_logprobs: Tensor | None = None
    """float32 [T]: the trainer's logprobs before the first update; None where they equal the current ones"""
    ref_logprobs: Tensor | None = None
    """float32 [T]: the reference policy's logprobs; None where nothing needs them"""
    values: Tensor | None = None
    """float32 [T]: what the critic expects of the rest of the answer before each sampled token; None without one"""
    returns: Tensor | None = None
    """float32 [T]: what the critic should have said; None without one"""
    marked: Tensor | None = None
    """bool [T]: tokens chosen over the global batch (clip-cov, kl-cov); None where nothing needs them"""

    @property
    def num_tokens(self) -> int:
        """T"""
        return int(self.token_ids.numel())

    @property
    def num_segments(self) -> int:
        """S"""
        return len(self.keys)

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`."""
        moved = {f.name: v.to(device) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return replace(self, **moved)

    def select(self, segments: Sequence[int]) -> "Batch":
        """A batch of these segments, in this order."""
        bounds = self.starts.tolist()
        index = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in segments] or [torch.arange(0)])
        index = index.to(self.token_ids.device)
        rows = torch.tensor(list(segments), dtype=torch.int64, device=index.device)
        lengths = [0] + [bounds[s + 1] - bounds[s] for s in segments]
        columns = {"starts": torch.tensor(lengths, device=index.device).cumsum(0)}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "starts" or value is None:
                continue
            columns[f.name] = value[rows] if f.name == "keys" else value[index]
        return Batch(**columns)


def sampled_runs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which sample, and which contiguous run of sampled tokens (a turn), each token of the loss mask belongs to.

    int64 [N] each, counting from 0 without gaps: samples without a sampled token are not counted.
    """
    owner = torch.arange(batch.num_segments, device=batch.starts.device).repeat_interleave(batch.starts.diff())
    begins = batch.loss_mask.clone()
    begins[1:] &= ~batch.loss_mask[:-1] | (owner[1:] != owner[:-1])
    runs = begins.cumsum(0)[batch.loss_mask] - 1
    return torch.unique_consecutive(owner[batch.loss_mask], return_inverse=True)[1], runs


def pack(samples: Iterable[Sample]) -> Batch:
    """Samples laid end to end in the order given; advantages and weights are zero. Legal with no sample at all."""
    ids, logprobs, versions, mask = array("i"), array("f"), array("i"), bytearray()
    lengths, keys = [], []
    for sample in samples:
        for turn in sample.turns:
            blank = len(turn.prompt_ids)
            ids.extend(turn.prompt_ids)
            ids.extend(turn.token_ids)
            logprobs.extend(array("f", [0.0]) * blank)
            logprobs.extend(turn.logprobs)
            versions.extend(array("i", [-1]) * blank)
            versions.extend(turn.versions)
            mask += b"\0" * blank + b"\1" * len(turn.token_ids)
        lengths.append(sample.num_tokens)
        keys.append(sample.key)
    return lay_out(
        keys,
        lengths,
        token_ids=torch.from_numpy(np.array(ids)).long(),
        loss_mask=torch.from_numpy(np.array(mask, dtype=bool)),
        rollout_logprobs=torch.from_numpy(np.array(logprobs)),
        versions=torch.from_numpy(np.array(versions)).long(),
    )


def lay_out(keys: Sequence[tuple[int, int]], lengths: Sequence[int], **columns: Tensor) -> Batch:
    """Segments of these keys and token counts; `columns` are those that a sample brings (see `pack`)."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = int(starts[-1])
    assert all(len(column) == num_tokens for column in columns.values())
    return Batch(
        position_ids=torch.arange(num_tokens) - starts[:-1].repeat_interleave(starts.diff()),
        starts=starts,
        keys=torch.tensor(keys, dtype=torch.int64).reshape(-1, 2),
        advantages=torch.zeros(num_tokens),
        weights=torch.zeros(num_tokens),
        **columns,
    )
