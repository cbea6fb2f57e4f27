"""A batch with a column of every kind, beside those that every batch has."""

from dataclasses import dataclass, field, fields

import torch

from spmd_rl.batch import Batch, Ragged, pack, per_sample, per_token
from spmd_rl.types import Sample


@dataclass(slots=True)
class TeacherBatch(Batch):
    """Columns as distillation and vision will have them."""

    hidden: torch.Tensor | None = field(default=None, metadata=per_token(torch.float64, shape=(3,)))
    top_ids: Ragged | None = field(default=None, metadata=per_token(torch.int32, ragged=True))
    reward: torch.Tensor | None = field(default=None, metadata=per_sample(torch.float32, "score"))
    pixels: Ragged | None = field(default=None, metadata=per_sample(torch.uint8, shape=(2, 2), ragged=True))


def teacher_batch(samples: list[Sample]) -> TeacherBatch:
    """Entries follow from a sample's key and a token's id and position, so that each can be checked where it lies."""
    plain = pack(samples)
    batch = TeacherBatch(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    ids, positions, numbers = batch.token_ids, batch.position_ids, batch.keys @ torch.tensor([10, 1])
    batch.hidden = (ids[:, None] + torch.arange(3) / 4).double()
    batch.top_ids = ragged(positions % 3, ids.int())
    batch.reward = numbers.float() / 2
    batch.pixels = ragged(numbers % 4, numbers.to(torch.uint8)[:, None, None].expand(-1, 2, 2))
    return batch


def ragged(sizes: torch.Tensor, values: torch.Tensor) -> Ragged:
    """Entry i is values[i], sizes[i] times."""
    return Ragged(values.repeat_interleave(sizes, 0), torch.nn.functional.pad(sizes.cumsum(0), (1, 0)))


def assert_same(got: Batch, wanted: Batch) -> None:
    """Every column, to the bit, with its dtype."""
    assert torch.equal(got.starts, wanted.starts)
    assert [name for name, _, _ in got.columns()] == [name for name, _, _ in wanted.columns()]
    for (name, column, value), (_, _, other) in zip(got.columns(), wanted.columns(), strict=True):
        pairs = [(value, other)]
        if column.ragged:
            assert torch.equal(value.offsets, other.offsets), name
            pairs = [(value.values, other.values)]
        for a, b in pairs:
            assert a.dtype == b.dtype == column.dtype and a.shape[1:] == column.shape and torch.equal(a, b), name
