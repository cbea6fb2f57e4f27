"""Columns of every kind: what a batch does with them follows from their declaration."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.batch import pack
from spmd_rl.train.microbatch import dummy, plan
from spmd_rl.types import Sample
from tests.columns import assert_same, teacher_batch
from tests.unit.test_prepare import sample

SAMPLES = [sample(ticket, answer, 2 + 3 * ticket + answer, 1.0) for ticket in range(3) for answer in range(3)]


@settings(deadline=None)
@given(order=st.lists(st.integers(0, len(SAMPLES) - 1), max_size=12))
def test_selected_samples_keep_all_their_entries(order: list[int]) -> None:
    assert_same(teacher_batch(SAMPLES).select(order), teacher_batch([SAMPLES[i] for i in order]))


def test_a_copy_on_a_device_has_every_column() -> None:
    batch = teacher_batch(SAMPLES)
    moved = batch.to(torch.device("meta"))
    assert [name for name, _, _ in moved.columns()] == [name for name, _, _ in batch.columns()]
    assert moved.pixels.values.is_meta and moved.top_ids.offsets.is_meta and moved.starts.is_meta
    assert_same(batch.to(torch.device("cpu")), batch)


def test_a_dummy_has_an_entry_of_every_kind() -> None:
    one = dummy(teacher_batch(SAMPLES))
    assert one.num_tokens == 2 and one.num_samples == 1
    assert one.hidden.shape == (2, 3) and one.reward.shape == (1,)
    assert one.top_ids.offsets.tolist() == [0, 0, 0] and one.pixels.offsets.tolist() == [0, 0]
    assert one.pixels.values.shape == (0, 2, 2)
    assert_same(one.select([0]), one)


def test_lags_count_versions_from_the_steps() -> None:
    batch = pack([sample(0, 0, 2, 1.0, version=3)], version=5)
    assert batch.lags.tolist() == [0, 0, 0, 2, 2]
    assert pack([sample(0, 0, 2, 1.0, version=3)]).lags.tolist() == [0] * 5


def test_a_unit_stays_in_one_micro_batch() -> None:
    pairs = [Sample(0, i, sample(0, i, 10, 1.0).turns, SAMPLES[0].verdict, unit=i // 2) for i in range(6)]
    batch = pack(pairs)
    assert batch.units.tolist() == [0, 0, 1, 1, 2, 2]
    assert plan(batch, 33) == [[0, 1], [2, 3], [4, 5]], "three answers would fit"
    assert plan(batch, 43) == [[0, 1, 2, 3], [4, 5]]
    assert plan(batch, 1) == [[0, 1], [2, 3], [4, 5]], "too long for the budget, and together all the same"
