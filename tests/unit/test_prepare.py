"""From outcomes to mini-batches: every number is a function of the global metadata."""

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.batch import pack
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn import prepare
from spmd_rl.rollout.collected import Collected, outcome
from spmd_rl.types import Group, Message, Prompt, Sample, Turn, Verdict


def sample(ticket: int, answer: int, length: int, score: float | None, version: int = 0) -> Sample:
    verdict = Verdict("ok", score) if score is not None else Verdict("timeout")
    turn = Turn(
        array("i", [1, 2, 3]),
        array("i", range(length)),
        array("f", [-0.1] * length),
        array("i", [version] * length),
        "stop",
    )
    return Sample(ticket, answer, (turn,), verdict)


def collected(groups: list[Group], mine: list[Group] | None = None, version: int = 0) -> Collected:
    outcomes = tuple(outcome(g, 0, None, version) for g in groups)
    return Collected(1, tuple(groups if mine is None else mine), (), outcomes, 0.0, 0)


def group(ticket: int, rows: list[tuple[int, float | None]]) -> Group:
    prompt = Prompt(f"{ticket:032x}", (Message("user", "?"),), "toy", "")
    return Group(prompt, ticket, tuple(sample(ticket, a, n, score) for a, (n, score) in enumerate(rows)))


GROUPS = [group(4, [(2, 1.0), (3, 0.0), (1, None)]), group(7, [(5, 0.5), (1, 0.0)]), group(9, [(2, 1.0), (2, 0.0)])]


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("num_updates", [1, 2, 3])
def test_weights_of_each_minibatch_sum_to_one_over_all_ranks(agg: str, num_updates: int) -> None:
    settings = AlgorithmConfig(loss_agg=agg)
    total = torch.zeros(num_updates, dtype=torch.float64)
    for mine in (GROUPS[:1], GROUPS[1:], []):
        c = collected(GROUPS, mine)
        plan = prepare.plan(c, settings, num_updates)
        for number, batch in enumerate(prepare.batches(c, plan, num_updates)):
            total[number] += batch.weights.double().sum()
    assert total.tolist() == pytest.approx([1.0] * num_updates)


def test_a_sample_without_score_is_in_no_batch_and_no_baseline() -> None:
    plan = prepare.plan(collected(GROUPS), AlgorithmConfig(norm_std=False), 1)
    assert plan.keys == ((4, 0), (4, 1), (7, 0), (7, 1), (9, 0), (9, 1))
    assert plan.advantages == (0.5, -0.5, 0.25, -0.25, 0.5, -0.5)
    assert not plan.stale
    assert prepare.plan(collected(GROUPS, version=1), AlgorithmConfig(), 1).stale


def test_columns_of_a_packed_batch() -> None:
    c = collected(GROUPS[:1])
    (batch,) = prepare.batches(c, prepare.plan(c, AlgorithmConfig(norm_std=False), 1), 1)
    assert batch.starts.tolist() == [0, 5, 11]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert batch.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 3
    assert batch.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, 0, -0.5, -0.5, -0.5]
    assert batch.weights[batch.loss_mask].tolist() == pytest.approx([0.2] * 5)


@given(order=st.permutations(range(4)))
def test_select_is_pack_of_the_selected(order: list[int]) -> None:
    samples = [sample(1, a, 1 + a, 1.0) for a in range(4)]
    chosen = pack(samples).select(order)
    expected = pack([samples[i] for i in order])
    for name in ("token_ids", "position_ids", "starts", "keys", "loss_mask", "rollout_logprobs", "versions"):
        assert torch.equal(getattr(chosen, name), getattr(expected, name)), name


def test_nothing_at_all_is_legal() -> None:
    c = collected([])
    plan = prepare.plan(c, AlgorithmConfig(), 2)
    assert plan.keys == () and not plan.stale
    assert [b.num_tokens for b in prepare.batches(c, plan, 2)] == [0, 0]
    assert pack([]).select([]).num_segments == 0
