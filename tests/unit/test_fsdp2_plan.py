"""The pure parts of the training wing: micro-batches and learning rates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.batch import Batch, pack
from spmd_rl.train.accumulate import learning_rate
from spmd_rl.train.microbatch import dummy, fill, padded, plan, token_index
from spmd_rl.train.sharing import share_prefixes


def batch_of(lengths, keys) -> Batch:
    total = sum(lengths)
    return Batch(
        token_ids=torch.arange(total),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        starts=torch.tensor([0, *lengths]).cumsum(0),
        keys=torch.tensor(keys),
        units=torch.arange(len(keys)),
        loss_mask=torch.zeros(total, dtype=torch.bool),
        rollout_logprobs=torch.zeros(total),
        lags=torch.zeros(total, dtype=torch.int32),
        advantages=torch.zeros(total),
        weights=torch.zeros(total),
    )


def paths(samples):
    """What each of (ticket, tokens of the prompt, tokens after it) needs."""
    return [{("prompt", ticket): prompt, i: rest} for i, (ticket, prompt, rest) in enumerate(samples)]


samples = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(0, 20)), max_size=30)


@given(samples, st.integers(1, 40))
def test_bins_hold_everything_once_within_the_budget(samples, budget):
    prompts = {ticket: prompt for ticket, prompt, _ in samples}  # one prompt a ticket
    samples = sorted((ticket, prompts[ticket], rest) for ticket, _, rest in samples)

    def cost(one):
        return sum(prompts[t] for t in {samples[i][0] for i in one}) + sum(samples[i][2] for i in one)

    bins = fill(paths(samples), budget)
    assert sorted(i for one in bins for i in one) == list(range(len(samples)))
    for one in bins:
        assert cost(one) <= budget or len(one) == 1
        assert one == sorted(one)
    assert all(cost(a + b) > budget for i, a in enumerate(bins) for b in bins[i + 1 :] if len(a) == len(b) == 1)


def test_a_ticket_stays_together_where_it_fits():
    samples = [(0, 5, 3), (0, 5, 3), (1, 5, 3), (1, 5, 3), (1, 5, 9)]
    assert fill(paths(samples), 11) == [[0, 1], [2, 3], [4]]
    assert fill(paths(samples), 30) == [[0, 1, 2, 3], [4]]
    assert fill(paths(samples), 31) == [[0, 1, 2, 3, 4]]


@given(st.permutations(range(6)))
def test_the_plan_follows_keys_not_the_layout(order):
    lengths, keys = [3, 9, 4, 1, 7, 2], [[1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [10, 0]]
    shuffled = batch_of([lengths[i] for i in order], [keys[i] for i in order])
    planned = [[tuple(shuffled.keys[s].tolist()) for s in one] for one in plan(shuffled, 10)]
    assert planned == [[(1, 0), (2, 0), (2, 1), (10, 0)], [(1, 1)], [(3, 0)]]


def test_the_dearest_micro_batch_comes_first():
    batch = batch_of([3, 9, 4, 10, 2, 5, 5], [[i, 0] for i in range(7)])
    assert plan(batch, 10) == [[3], [5, 6], [1], [0, 2, 4]]  # of as many tokens, the longer sequences


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
    batch = batch_of([3, 2], [[0, 0], [1, 0]])
    tree = share_prefixes(batch)
    more = padded(tree, 4)
    assert more.token_ids.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert more.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert more.starts.tolist() == [0, 3, 5, 8] and more.parents.tolist() == [-1, -1, -1]
    assert more.gather_index.tolist() == [0, 1, 2, 3, 4]
    assert padded(tree, 5) is tree
