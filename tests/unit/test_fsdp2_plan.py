"""The pure parts of the training wing: micro-batches and learning rates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.batch import Batch, pack
from spmd_rl.train.microbatch import dummy, fill, plan, rounded, token_index
from spmd_rl.train.schedule import learning_rate


def batch_of(lengths, keys) -> Batch:
    total = sum(lengths)
    return Batch(
        token_ids=torch.arange(total),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        starts=torch.tensor([0, *lengths]).cumsum(0),
        parents=torch.full((len(lengths),), -1),
        keys=torch.tensor(keys),
        loss_mask=torch.zeros(total, dtype=torch.bool),
        rollout_logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int64),
        advantages=torch.zeros(total),
        weights=torch.zeros(total),
    )


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 40))
def test_bins_hold_everything_once_within_the_budget(lengths, budget):
    bins = fill(lengths, budget)
    assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
    for one in bins:
        assert sum(lengths[i] for i in one) <= budget or len(one) == 1
        assert one == sorted(one)
    totals = [sum(lengths[i] for i in one) for one in bins]
    assert all(a + b > budget for i, a in enumerate(totals) for b in totals[i + 1 :])  # no two would fit one


@given(st.permutations(range(6)))
def test_the_plan_follows_keys_not_the_layout(order):
    lengths, keys = [3, 9, 4, 1, 7, 2], [[1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [10, 0]]
    shuffled = batch_of([lengths[i] for i in order], [keys[i] for i in order])
    planned = [[tuple(shuffled.keys[s].tolist()) for s in one] for one in plan(shuffled, 10)]
    assert planned == [[(1, 0), (2, 0), (2, 1), (10, 0)], [(1, 1)], [(3, 0)]]


def test_token_index_says_where_selected_tokens_lie():
    batch = batch_of([3, 2, 4], [[0, 0], [0, 1], [0, 2]])
    index = token_index(batch, [2, 0])
    assert torch.equal(batch.token_ids[index], batch.select([2, 0]).token_ids)


def test_an_empty_batch_needs_no_micro_batch():
    assert plan(pack([]), 100) == []


def test_a_dummy_weighs_nothing_and_has_the_columns_of_the_batch():
    batch = pack([])
    assert dummy(batch).old_logprobs is None
    batch.old_logprobs = torch.zeros(0)
    one = dummy(batch)
    assert one.old_logprobs.shape == (2,) and one.ref_logprobs is None
    assert one.loss_mask.tolist() == [False, True] and one.weights.sum() == 0


def rates(schedule, warmup, total, updates):
    return [learning_rate(u, peak=2.0, schedule=schedule, warmup=warmup, total=total) for u in range(updates)]


def test_schedules():
    assert rates("constant", 0, 3, 4) == [2.0] * 4
    assert rates("constant", 2, 4, 4) == [1.0, 2.0, 2.0, 2.0]
    assert rates("linear", 0, 4, 6) == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert rates("linear", 2, 4, 5) == [1.0, 2.0, 2.0, 1.0, 0.0]
    assert rates("cosine", 0, 4, 5) == pytest.approx([2.0, 1.7071, 1.0, 0.2929, 0.0], abs=1e-4)
    assert rates("linear", 9, 4, 3) == pytest.approx([2 / 9, 4 / 9, 6 / 9])
    with pytest.raises(ValueError, match="constant, linear, cosine"):
        rates("sinus", 0, 4, 1)


def test_rounding_fills_up_with_a_segment_of_its_own() -> None:
    ids, positions, starts = rounded(torch.arange(5), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 3, 5]), 4)
    assert ids.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert starts.tolist() == [0, 3, 5, 8]
    assert rounded(torch.arange(4), torch.arange(4), torch.tensor([0, 4]), 4)[2].tolist() == [0, 4]
