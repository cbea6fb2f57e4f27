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
import torch.nn.functional as F
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

    def select(self, segments: Sequence[int] | Tensor) -> "Batch":
        """A batch of these segments, in this order."""
        rows = torch.as_tensor(segments, dtype=torch.int64, device=self.starts.device)
        lengths = self.starts.diff()[rows]
        index = _runs(self.starts[rows], lengths)
        columns = {"starts": _bounds(lengths), "keys": self.keys[rows]}
        for f in fields(self):
            if f.name not in columns and (value := getattr(self, f.name)) is not None:
                columns[f.name] = value.index_select(0, index)
        return Batch(**columns)


def column(values: Sequence[float] | np.ndarray, dtype: type[np.generic] = np.int64) -> Tensor:
    """`torch.tensor` of plain numbers, in a third of its time."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def stretches(rows: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begins[i] : begins[i] + lengths[i] of `rows`, end to end for all i."""
    ends = lengths.cumsum()
    return rows.take(np.arange(ends[-1] if len(ends) else 0) + (begins - ends + lengths).repeat(lengths))


def _runs(starts: Tensor, lengths: Tensor) -> Tensor:
    """starts[i], starts[i] + 1, ..., starts[i] + lengths[i] - 1, end to end for all i. int64 [sum of `lengths`]."""
    bounds = _bounds(lengths)
    shifts = (starts - bounds[:-1]).repeat_interleave(lengths)
    return torch.arange(int(bounds[-1]), device=starts.device) + shifts


def _bounds(lengths: Tensor) -> Tensor:
    """Where each run of these lengths begins, laid end to end, and where the last one ends. int64 [len + 1]."""
    return F.pad(lengths.cumsum(0), (1, 0))


def sampled_runs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which sample, and which contiguous run of sampled tokens (a turn), each token of the loss mask belongs to.

    int64 [N] each, counting from 0 without gaps: samples without a sampled token are not counted.
    """
    owner = torch.arange(batch.num_segments, device=batch.starts.device).repeat_interleave(batch.starts.diff())
    begins = batch.loss_mask.clone()
    begins[1:] &= ~batch.loss_mask[:-1] | (owner[1:] != owner[:-1])
    runs = begins.cumsum(0)[batch.loss_mask] - 1
    return torch.unique_consecutive(owner[batch.loss_mask], return_inverse=True)[1], runs


TOKEN = np.dtype([("token_ids", "<i4"), ("rollout_logprobs", "<f4"), ("versions", "<i4"), ("loss_mask", "?")])
"""What a sample brings of each token: 13 bytes."""


def flatten(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """All tokens laid end to end, `TOKEN` [T], and how many each sample has, int64 [S]."""
    turns = [turn for sample in samples for turn in sample.turns]
    parts = [part for turn in turns for part in (turn.prompt_ids, turn.token_ids)]
    lengths = np.array([len(part) for part in parts], np.int64)
    mask = np.repeat(np.arange(len(parts)) % 2 == 1, lengths)
    tokens = np.zeros(len(mask), TOKEN)
    tokens["token_ids"] = _joined(parts, np.int32)
    tokens["rollout_logprobs"][mask] = _joined([turn.logprobs for turn in turns], np.float32)
    tokens["versions"] = -1
    tokens["versions"][mask] = _joined([turn.versions for turn in turns], np.int32)
    tokens["loss_mask"] = mask
    bounds = _cumulated(lengths)[2 * _cumulated([len(sample.turns) for sample in samples])]
    return tokens, bounds[1:] - bounds[:-1]


def _joined(arrays: Sequence[array], dtype: type[np.generic]) -> np.ndarray:
    """All elements of arrays, in order."""
    return np.frombuffer(b"".join(arrays), dtype)


def _cumulated(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each run of these lengths begins, laid end to end, and where the last one ends. int64 [len + 1]."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def lay_out(
    keys: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, advantages: np.ndarray, weights: np.ndarray
) -> Batch:
    """Segments of these keys, int64 [S, 2], with token counts, int64 [S], and tokens, `TOKEN` [T]; all are copied.

    advantages, weights: float64 [S], of each sampled token of the segment.
    """
    starts = _cumulated(lengths)
    assert starts[-1] == len(tokens)
    mask = tokens["loss_mask"].copy()
    positions = np.arange(len(tokens))
    positions -= np.repeat(starts[:-1], lengths)
    return Batch(
        token_ids=column(tokens["token_ids"]),
        position_ids=torch.from_numpy(positions),
        starts=torch.from_numpy(starts),
        keys=column(keys),
        loss_mask=torch.from_numpy(mask),
        rollout_logprobs=column(tokens["rollout_logprobs"], np.float32),
        versions=column(tokens["versions"]),
        advantages=_at_sampled(advantages, lengths, mask),
        weights=_at_sampled(weights, lengths, mask),
    )


def _at_sampled(values: np.ndarray, lengths: np.ndarray, mask: np.ndarray) -> Tensor:
    """The value of each segment at its sampled tokens, 0 elsewhere; float32 [T]."""
    spread = np.repeat(values.astype(np.float32), lengths)
    spread *= mask
    return torch.from_numpy(spread)


def pack(samples: Iterable[Sample]) -> Batch:
    """Samples laid end to end in the order given; advantages and weights are zero. Legal with no sample at all."""
    samples = list(samples)
    tokens, lengths = flatten(samples)
    keys = np.array([sample.key for sample in samples], np.int64).reshape(-1, 2)
    return lay_out(keys, lengths, tokens, *np.zeros((2, len(samples))))
