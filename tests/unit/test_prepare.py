"""From outcomes to mini-batches: every number is a function of the global metadata."""

from array import array
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from spmd_rl.algo import ADVANTAGES, TOKEN_ADVANTAGES
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import Batch, pack
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.learn import balance
from spmd_rl.learn.losses import bind_loss
from spmd_rl.learn.prepare import UpdatePlan
from spmd_rl.rollout.collected import Collected
from spmd_rl.types import Group, Message, Prompt, Sample, Turn, Verdict
from tests import plans
from tests.fakes import table_of


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


def collected(groups: list[Group], version: int = 0) -> Collected:
    return Collected(1, tuple(groups), (), table_of(groups, lambda s: 0, version), 0.0, 0, 0)


def group(ticket: int, rows: list[tuple[int, float | None]]) -> Group:
    prompt = Prompt(f"{ticket:032x}", (Message("user", "?"),), "toy", "")
    return Group(prompt, ticket, tuple(sample(ticket, a, n, score) for a, (n, score) in enumerate(rows)))


GROUPS = [group(4, [(2, 1.0), (3, 0.0), (1, None)]), group(7, [(5, 0.5), (1, 0.0)]), group(9, [(2, 1.0), (2, 0.0)])]


def planned(groups: list[Group], num_updates: int = 1, num_shards: int = 1, version: int = 0, **settings) -> UpdatePlan:
    c = collected(groups, version=version)
    algorithm = AlgorithmConfig(**settings)
    return plan_of(c, algorithm, num_updates=num_updates, num_shards=num_shards)


def plan_of(c: Collected, algorithm: AlgorithmConfig, num_updates: int = 1, num_shards: int = 1) -> UpdatePlan:
    sizes = {"num_updates": num_updates, "num_shards": num_shards, "hidden_size": 64, "max_tokens": 1024}
    return plans.plan(c, algorithm, Moments(), **sizes)[0]


def columns(plan: UpdatePlan) -> list:
    """Everything in it, as plain values."""
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in plan.columns()]


def batches(groups: list[Group], num_updates: int = 1, **settings) -> list[Batch]:
    with solo() as world:
        plan = planned(groups, num_updates, **settings)
        return plans.redistribute(collected(groups), plan, num_updates, Layout(world).data, world)


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("num_updates", [1, 2, 3])
def test_weights_of_each_minibatch_sum_to_one(agg: str, num_updates: int) -> None:
    sums = [float(batch.weights.double().sum()) for batch in batches(GROUPS, num_updates, loss_agg=agg)]
    assert sums == pytest.approx([1.0] * num_updates)


def test_a_sample_without_score_is_in_no_batch_and_no_baseline() -> None:
    plan = planned(GROUPS, norm_std=False)
    assert plan.keys.tolist() == [[4, 0], [4, 1], [7, 0], [7, 1], [9, 0], [9, 1]]
    assert plan.advantages.tolist() == [0.5, -0.5, 0.25, -0.25, 0.5, -0.5]
    assert not plan.stale
    assert planned(GROUPS, version=1).stale


FAILED = [Verdict("timeout", 9e9), Verdict("error", float("nan")), Verdict("rejected", -5.0)]
"""No scores, whatever stands in the field."""
SHAPED = {"norm_mean_type": "batch", "norm_std_type": "running", "difficulty_loss_weight": True}


@pytest.mark.parametrize("shaping", [{}, SHAPED], ids=["plain", "shaped"])
@pytest.mark.parametrize("advantage", [*ADVANTAGES, *TOKEN_ADVANTAGES])
def test_no_estimator_sees_a_verdict_that_is_no_score(advantage: str, shaping: dict) -> None:
    """The plan is the one without those samples: no advantage for them, no place in a baseline, moment or divisor."""
    if advantage in ("remax", "pass_at_k", "maxrl", "starpo", "gigpo"):  # they refuse the norms
        shaping = {"difficulty_loss_weight": True} if shaping else {}
    weights = {"a": 1.0, "b": 0.5} if advantage == "gdpo" else {}
    shaping = {} if weights else shaping
    algorithm = AlgorithmConfig(advantage=advantage, pass_k=2, reward_weights=weights, **shaping)
    greedy = 3 if algorithm.uses_greedy else None
    clean = [group(t, [(2 + t, 1.0), (3, 0.0), (4, 0.5), (1 + t, 1.0)]) for t in range(3)]
    dirty = []
    for g, verdict in zip(clean, FAILED, strict=True):
        more = (structs.replace(sample(g.ticket, number, 9, 1.0), verdict=verdict) for number in (4, 5))
        dirty.append(structs.replace(g, samples=(*g.samples, *more)))
    dirty.append(group(3, [(5, None), (5, None), (5, None), (5, None)]))
    sizes = {"num_updates": 2, "num_shards": 2, "hidden_size": 64, "max_tokens": 1024, "greedy_answer": greedy}
    if weights:
        sizes["terms"] = {(t, answer): (float(t == answer), answer / 2) for t in range(3) for answer in range(4)}
    made = [plans.plan(collected(some), algorithm, Moments(), **sizes) for some in (clean, dirty)]
    assert columns(made[0][0]) == columns(made[1][0]) and made[0][1] == made[1][1]
    assert any(made[0][0].advantages) and len(made[0][0].keys) == (9 if greedy else 12)


def test_each_minibatch_is_balanced_by_itself() -> None:
    lengths = [[900, 100, 700], [300, 500, 200], [600, 400, 800], [50, 1000, 450]]
    groups = [group(ticket, [(n, float(i)) for i, n in enumerate(row)]) for ticket, row in enumerate(lengths)]
    plan = planned(groups, num_updates=2, num_shards=3)
    tokens, shards, minibatches = plan.lengths.tolist(), plan.data_rank.tolist(), plan.minibatches.tolist()
    assert tokens == [n + 3 for row in lengths for n in row]
    assert minibatches == [0] * 6 + [1] * 6
    slowest = total = 0
    prompt = balance.workload(3, 64)  # computed once for the samples of a ticket on a rank
    for number in range(2):
        rows = [row for row, m in enumerate(minibatches) if m == number]
        loads = [prompt * len({int(plan.keys[r][0]) for r in rows if shards[r] == rank}) for rank in range(3)]
        for row in rows:
            loads[shards[row]] += balance.workload(tokens[row], 64) - prompt
        assert all(loads) and max(loads) < 1.25 * sum(loads) / 3
        slowest, total = slowest + max(loads), total + sum(loads)
    assert plan.balance == pytest.approx(3 * slowest / total)
    assert planned(groups).balance == 1.0


def test_who_trains_a_sample_does_not_depend_on_who_made_it() -> None:
    made = collected(GROUPS)
    elsewhere = replace(made, table=table_of(GROUPS, lambda s: s.ticket % 3))
    plans = [plan_of(c, AlgorithmConfig(), num_shards=3) for c in (made, elsewhere)]
    assert not np.array_equal(plans[0].src_rank, plans[1].src_rank)
    assert np.array_equal(plans[0].data_rank, plans[1].data_rank) and set(plans[0].data_rank.tolist()) == {0, 1, 2}


def test_columns_of_a_packed_batch() -> None:
    (batch,) = batches(GROUPS[:1], norm_std=False)
    assert batch.starts.tolist() == [0, 5, 11]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert batch.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 3
    assert batch.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, 0, -0.5, -0.5, -0.5]
    assert batch.weights[batch.loss_mask].tolist() == pytest.approx([0.2] * 5)


@settings(deadline=None)
@given(order=st.permutations(range(4)))
def test_select_is_pack_of_the_selected(order: list[int]) -> None:
    samples = [sample(1, a, 1 + a, 1.0) for a in range(4)]
    chosen = pack(samples).select(order)
    expected = pack([samples[i] for i in order])
    for name in ("token_ids", "position_ids", "starts", "keys", "loss_mask", "rollout_logprobs", "lags", "units"):
        assert torch.equal(getattr(chosen, name), getattr(expected, name)), name


def test_nothing_at_all_is_legal() -> None:
    plan = planned([], num_updates=2)
    assert len(plan.keys) == 0 and not plan.stale and plan.balance == 1.0
    assert [b.num_tokens for b in batches([], 2)] == [0, 0]
    assert pack([]).select([]).num_samples == 0


def test_the_supervised_term_is_the_mean_over_the_tokens_of_right_answers() -> None:
    """4 answers of 5, 5, 10, 10 tokens with a logprob of -0.5: the loss, and the gradient at a right token."""
    for scores, aggregation in product([[1.0, 0.0, 0.0, 0.0], [1.0] * 4], ["token-mean", "seq-mean-token-sum"]):
        c = collected([group(0, list(zip([5, 5, 10, 10], scores, strict=True)))])
        algorithm = AlgorithmConfig(sft_coef=0.1, loss="vanilla_pg", loss_agg=aggregation)
        with solo() as world:
            plan = plan_of(c, algorithm)
            (batch,) = plans.redistribute(c, plan, 1, Layout(world).data, world)
        batch.advantages = torch.zeros(batch.num_tokens)
        logprobs = torch.full((30,), -0.5, requires_grad=True)
        per_token, _ = bind_loss(algorithm)(logprobs, torch.zeros(30), batch)
        total = (per_token * batch.weights[batch.sampled.index]).sum()
        (gradient,) = torch.autograd.grad(total, logprobs)
        assert total.item() == pytest.approx(0.05)
        assert gradient[0].item() == pytest.approx(-0.1 / (5 if scores[1] == 0 else 30))
        assert scores[1] or gradient[5:].abs().max() == 0
