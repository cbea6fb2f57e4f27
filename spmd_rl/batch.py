"""The packed columnar `Batch`: tensors of many samples laid end to end, without padding.

Columns declare dtype, shape and owner of their entries (token or sample); an entry of a ragged column is a list.
Subclasses add columns; selection and transfer follow the declarations. Common prefixes are found later
(`train/sharing.py`).
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.base.devices import to_device
from spmd_rl.types import CandidateIds, Sample, Turn


@dataclass(frozen=True, slots=True)
class Column:
    """Layout of one column of a `Batch`."""

    per: Literal["token", "sample"]
    """Owner of an entry: one of T tokens or of S samples."""
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    """Shape of an entry; in a ragged column, of an item of its list."""
    unit: str = ""
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of different lengths, laid end to end."""

    values: Tensor
    """[V, ...]"""
    offsets: Tensor
    """int64 [N+1]: list i is values[offsets[i] : offsets[i + 1]]"""

    @property
    def owners(self) -> Tensor:
        """int64 [V]: list of each value"""
        lengths = self.offsets.diff()
        numbers = torch.arange(len(lengths), device=self.offsets.device)
        return numbers.repeat_interleave(lengths, output_size=len(self.values))

    def to(self, device: torch.device) -> "Ragged":
        """Return a copy on `device`."""
        return Ragged(to_device(self.values, device), to_device(self.offsets, device))

    def index_select(self, dim: int, index: Tensor) -> "Ragged":
        """Return the lists with these numbers, in this order; `dim` must be 0."""
        assert dim == 0
        lengths = self.offsets.diff()[index]
        return Ragged(self.values.index_select(0, run_indices(self.offsets[index], lengths)), bounds_of(lengths))


Entries = Tensor | Ragged


@dataclass(frozen=True, slots=True)
class Sampled:
    """Indices of the N sampled tokens; a boolean mask would synchronise the device."""

    index: Tensor
    """int64 [N]: position of each token of the loss mask"""
    samples: Tensor
    """int64 [N]: sample of the token, numbered without gaps"""
    spans: Tensor
    """int64 [N]: contiguous span of sampled tokens (a turn)"""

    def to(self, device: torch.device) -> "Sampled":
        """Return a copy on `device`."""
        return Sampled(*(to_device(value, device) for value in (self.index, self.samples, self.spans)))


def per_token(dtype: torch.dtype, unit: str = "", shape: tuple[int, ...] = (), ragged: bool = False) -> dict[str, Any]:
    """Return the metadata of a column with one entry per token."""
    return {"column": Column("token", dtype, shape, unit, ragged)}


def per_sample(dtype: torch.dtype, unit: str = "", shape: tuple[int, ...] = (), ragged: bool = False) -> dict[str, Any]:
    """Return the metadata of a column with one entry per sample."""
    return {"column": Column("sample", dtype, shape, unit, ragged)}


class _Remembered:
    __slots__ = ("_sampled",)


@dataclass(slots=True)
class Batch(_Remembered):
    """Samples of one rank, packed: S samples of T tokens in all, on one device."""

    starts: Tensor
    """int64 [S+1]: first token of each sample, then T"""
    keys: Tensor = field(metadata=per_sample(torch.int64, shape=(2,)))
    """int64 [S, 2]: (ticket, answer); (-1, -1) for a filler"""
    units: Tensor = field(metadata=per_sample(torch.int64))
    """int64 [S]: samples of a ticket with equal numbers share a rank and a micro-batch (`Sample.unit`)"""
    token_ids: Tensor = field(metadata=per_token(torch.int64))
    """int64 [T], all samples end to end"""
    position_ids: Tensor = field(metadata=per_token(torch.int64))
    """int64 [T]: 0, 1, ... within each sample"""
    loss_mask: Tensor = field(metadata=per_token(torch.bool))
    """bool [T]: tokens that the policy sampled"""
    rollout_logprobs: Tensor = field(metadata=per_token(torch.float32, "nats"))
    """float32 [T]: the engine's logprob of each sampled token; 0 elsewhere, and in written rows"""
    lags: Tensor = field(metadata=per_token(torch.int32, "policy versions"))
    """int32 [T]: versions between the sampling policy and the step's; 0 elsewhere"""
    candidate_ids: Ragged | None = field(default=None, metadata=per_token(torch.int32, "token ids", ragged=True))
    """T lists of int32: the support of all logprobs. Empty list or None: all tokens"""
    experts: Ragged | None = field(default=None, metadata=per_token(torch.int16, "experts", ragged=True))
    """T lists of int16: experts to which the engine routed each sampled token, layer by layer; -1 where it did not
    compute the token. None without router replay
    """
    advantages: Tensor | None = field(default=None, metadata=per_token(torch.float32))
    """float32 [T]: 0 outside the loss mask; None before the plan"""
    weights: Tensor | None = field(default=None, metadata=per_token(torch.float32))
    """float32 [T]: weight of the token's loss in the *global* batch (token-mean: 1 / global token count): a sum over
    any split of the batch is the loss
    """
    old_logprobs: Tensor | None = field(default=None, metadata=per_token(torch.float32, "nats"))
    """float32 [T]: the trainer's logprobs before the first update; None if equal to the current ones"""
    ref_logprobs: Tensor | None = field(default=None, metadata=per_token(torch.float32, "nats"))
    """float32 [T]: the reference's logprobs"""
    teacher_logprobs: Tensor | None = field(default=None, metadata=per_token(torch.float32, "nats"))
    """float32 [T]: the teacher's logprobs of the sampled tokens, NaN where no teacher is asked"""
    teacher_ids: Ragged | None = field(default=None, metadata=per_token(torch.int32, "token ids", ragged=True))
    """T lists of int32: the teacher's k most likely tokens in place of each sampled token. None: not compared"""
    teacher_top: Ragged | None = field(default=None, metadata=per_token(torch.float32, "nats", ragged=True))
    """T lists of float32: their logprobs under the teacher, -inf where no teacher is asked"""
    hints: Ragged | None = field(default=None, metadata=per_sample(torch.int32, "token ids", ragged=True))
    """S lists of int32: prompt of a teacher with a hint; empty: the policy's"""
    values: Tensor | None = field(default=None, metadata=per_token(torch.float32, "score"))
    """float32 [T]: the critic's estimate of the return before each sampled token"""
    returns: Tensor | None = field(default=None, metadata=per_token(torch.float32, "score"))
    """float32 [T]: target of the critic"""
    turns: Tensor | None = field(default=None, metadata=per_token(torch.int64))
    """int64 [T]: equal numbers mark the sampled tokens of one turn; None: each sample is one"""
    trajectories: Tensor | None = field(default=None, metadata=per_sample(torch.int64))
    """int64 [S]: equal numbers mark the segments of one trajectory, in order; None: each sample is one"""
    marked: Tensor | None = field(default=None, metadata=per_token(torch.bool))
    """bool [T]: tokens chosen over the global batch (clip-cov, kl-cov)"""
    right: Tensor | None = field(default=None, metadata=per_token(torch.float32))
    """float32 [T]: see `Tokens.right`, 0 outside the loss mask"""
    reference_sums: Tensor | None = field(default=None, metadata=per_sample(torch.float32, "nats"))
    """float32 [S]: the reference's logprob of the whole answer (preference losses)"""
    margins: Tensor | None = field(default=None, metadata=per_sample(torch.float32, "score"))
    """float32 [S]: margin of a pair's chosen answer, 0 for the rejected one (reward models on pairs)"""
    pictures: Ragged | None = field(default=None, metadata=per_sample(torch.uint8, "encoded bytes", ragged=True))
    """S lists of bytes: each sample's encoded pictures, in the order of their negative token ids (`types.pictures`).
    None for a model of text alone
    """
    picture_sizes: Ragged | None = field(default=None, metadata=per_sample(torch.int64, "bytes", ragged=True))
    """S lists of int64: sizes of these pictures"""
    labels: Tensor | None = field(default=None, metadata=per_token(torch.float32))
    """float32 [T]: 1 at the learnt token of each right answer or step, 0 elsewhere (reward models on labels)"""

    @property
    def num_tokens(self) -> int:
        """Total number of tokens, T."""
        return int(self.token_ids.numel())

    @property
    def num_samples(self) -> int:
        """Number of samples in the batch, S."""
        return len(self.keys)

    def columns(self) -> Iterator[tuple[str, Column, Entries]]:
        """Yield name, declaration and values of each present column."""
        for f in fields(self):
            if "column" in f.metadata and (value := getattr(self, f.name)) is not None:
                yield f.name, f.metadata["column"], value

    @property
    def sampled(self) -> Sampled:
        """Indices of the loss mask's tokens; cached."""
        if not hasattr(self, "_sampled"):
            self._sampled = _sampled(self)
        return self._sampled

    @property
    def by_trajectory(self) -> tuple[Tensor | None, Tensor]:
        """(order, number): the N sampled tokens in which each trajectory is contiguous, and each one's trajectory in
        that order: int64 [N], 0, 1, ... without gaps. order is None if they are contiguous already.
        """
        if self.trajectories is None:
            return None, self.sampled.samples
        numbers = self.trajectories.repeat_interleave(self.starts.diff(), output_size=self.num_tokens)
        numbers = numbers[self.sampled.index]
        order = numbers.argsort(stable=True)
        return order, torch.unique_consecutive(numbers[order], return_inverse=True)[1]

    @property
    def encoded_pictures(self) -> list[tuple[bytes, ...]]:
        """Encoded pictures of each sample."""
        if self.pictures is None:
            return [()] * self.num_samples
        data, ends = self.pictures.values.cpu().numpy().tobytes(), self.picture_sizes.values.cumsum(0).tolist()
        every = [data[begin:end] for begin, end in pairwise([0, *ends])]
        return [tuple(every[a:b]) for a, b in pairwise(self.picture_sizes.offsets.tolist())]

    def to(self, device: torch.device) -> "Batch":
        """Return a copy on `device`."""
        columns = {
            name: to_device(value, device) if isinstance(value, Tensor) else value.to(device)
            for name, _, value in self.columns()
        }
        moved = type(self)(to_device(self.starts, device), **columns)
        moved._sampled = self.sampled.to(device)
        return moved

    def select(self, samples: Sequence[int] | Tensor) -> "Batch":
        """Return a batch of these samples, in this order."""
        rows = torch.as_tensor(samples, dtype=torch.int64, device=self.starts.device)
        lengths = self.starts.diff()[rows]
        index = {"token": run_indices(self.starts[rows], lengths), "sample": rows}
        chosen = {name: value.index_select(0, index[column.per]) for name, column, value in self.columns()}
        return type(self)(bounds_of(lengths), **chosen)


def as_tensor(values: Sequence[float] | np.ndarray, dtype: type[np.generic] = np.int64) -> Tensor:
    """Return `torch.tensor` of plain numbers, in a third of the time."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def run_indices(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return starts[i], ..., starts[i] + lengths[i] - 1, end to end for all i."""
    bounds = bounds_of(lengths)
    shifts = (starts - bounds[:-1]).repeat_interleave(lengths)
    return torch.arange(int(bounds[-1]), device=starts.device) + shifts


def bounds_of(lengths: Tensor) -> Tensor:
    """Return the bounds of consecutive runs of these lengths, int64 [len + 1]."""
    return F.pad(lengths.cumsum(0), (1, 0))


def _sampled(batch: Batch) -> Sampled:
    owner = torch.arange(batch.num_samples, device=batch.starts.device).repeat_interleave(batch.starts.diff())
    begins = batch.loss_mask.clone()
    begins[1:] &= ~batch.loss_mask[:-1] | (owner[1:] != owner[:-1])
    index = batch.loss_mask.nonzero().squeeze(-1)
    samples = torch.unique_consecutive(owner[index], return_inverse=True)[1]
    return Sampled(index, samples, begins.cumsum(0)[index] - 1)


def pack(
    samples: Iterable[Sample],
    version: int | None = None,
    truncated: bool = False,
    replayed: bool = False,
    seen: bool = False,
) -> Batch:
    """Pack samples in order, with zero advantages and weights.

    version: of the policy in this step, from which lags count (None: no lag). truncated, replayed, seen: True if the
    batch has `candidate_ids`, `experts`, `pictures`, even without samples.
    """
    samples = list(samples)
    turns = [turn for sample in samples for turn in sample.turns]
    runs = [run for turn in turns for run in (turn.prompt_ids, turn.token_ids)]
    lengths = np.array([len(run) for run in runs], np.int64)
    mask = np.repeat(np.arange(len(runs)) % 2 == 1, lengths)
    logprobs, lags = np.zeros(len(mask), np.float32), np.zeros(len(mask), np.int32)
    logprobs[mask] = _joined([turn.logprobs for turn in turns], np.float32)
    if version is not None:
        lags[mask] = version - _joined([turn.versions for turn in turns], np.int32)
    num_turns = np.array([len(sample.turns) for sample in samples], np.int64)
    starts = _cumulated(lengths)[2 * _cumulated(num_turns)]
    shown = [[data for turn in sample.turns for data in turn.pictures] for sample in samples]
    return Batch(
        starts=torch.from_numpy(starts),
        keys=as_tensor([sample.key for sample in samples]).reshape(-1, 2),
        units=as_tensor([sample.unit_number for sample in samples]),
        token_ids=as_tensor(_joined(runs, np.int32)),
        position_ids=positions(torch.from_numpy(starts)),
        loss_mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(logprobs),
        lags=torch.from_numpy(lags),
        candidate_ids=_candidate_ids(turns, mask) if truncated else None,
        experts=_experts(turns, mask) if replayed else None,
        advantages=torch.zeros(len(mask)),
        weights=torch.zeros(len(mask)),
        **(picture_columns(shown) if seen else {}),
    )


def _candidate_ids(turns: Sequence[Turn], mask: np.ndarray) -> Ragged:
    cut = [turn.candidate_ids or CandidateIds(array("i", bytes(4 * len(turn.token_ids))), array("i")) for turn in turns]
    counts = np.zeros(len(mask), np.int64)
    counts[mask] = _joined([candidates.counts for candidates in cut], np.int32)
    ids = _joined([candidates.ids for candidates in cut], np.int32)
    return Ragged(as_tensor(ids, np.int32), torch.from_numpy(_cumulated(counts)))


def _experts(turns: Sequence[Turn], mask: np.ndarray) -> Ragged:
    found = [turn.experts or array("h") for turn in turns]
    lengths = np.array([len(turn.token_ids) for turn in turns], np.int64)
    totals = np.array([len(experts) for experts in found], np.int64)
    counts = np.zeros(len(mask), np.int64)
    counts[mask] = (totals // np.maximum(lengths, 1)).repeat(lengths)
    return Ragged(as_tensor(_joined(found, np.int16), np.int16), torch.from_numpy(_cumulated(counts)))


def picture_columns(every: Sequence[Sequence[bytes]]) -> dict[str, Ragged]:
    """Return the columns `pictures` and `picture_sizes` from the encoded pictures of each sample."""
    counts, sizes = [len(some) for some in every], [sum(map(len, some)) for some in every]
    joined = list(chain.from_iterable(every))
    data = torch.from_numpy(np.frombuffer(bytearray().join(joined), np.uint8))
    lengths = Ragged(as_tensor([len(one) for one in joined]), bounds_of(as_tensor(counts)))
    return {"pictures": Ragged(data, bounds_of(as_tensor(sizes))), "picture_sizes": lengths}


def positions(starts: Tensor) -> Tensor:
    """Return each token's position within its sample, int64 [T], from int64 [S+1]."""
    return run_indices(torch.zeros_like(starts[:-1]), starts.diff())


def _joined(arrays: Sequence[array], dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(b"".join(arrays), dtype)


def _cumulated(lengths: np.ndarray) -> np.ndarray:
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds
