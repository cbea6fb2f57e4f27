"""A trajectory is one answer, whether it is one sample or several segments: in the plan, the loss and the weights."""

from collections import defaultdict
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from msgspec import structs

from spmd_rl.algo import AGGREGATIONS
from spmd_rl.algo.moments import Moments
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import Layout, solo
from spmd_rl.learn import sample_log
from spmd_rl.learn.advantages import repetition_penalties
from spmd_rl.learn.losses import bind_loss
from spmd_rl.learn.prepare import UpdatePlan
from spmd_rl.types import Group
from tests import plans
from tests.agents import SEGMENTS, Step, collected, group, trajectory
from tests.unit.algo.cases import KEYS

SIZES = {"num_shards": 1, "hidden_size": 64, "max_tokens": 64}


def groups(cut: bool, seed: int = 0, num_groups: int = 4) -> list[Group]:
    """The same trajectories of one to five turns, whole or cut."""
    draw, made = Random(seed), []
    for ticket in range(num_groups):
        some = []
        for answer in range(3):
            steps = [Step(draw.randrange(4) / 2, draw.randrange(2), draw.randrange(1, 5)) for _ in range(answer + 2)]
            cuts = sorted(draw.sample(range(1, len(steps)), draw.randrange(len(steps))))
            some.append(trajectory(ticket, answer, steps, cuts if cut else (), seed=seed))
        made.append(group(ticket, some, "ab"[ticket % 2]))
    return made


def plan_of(some: list[Group], num_updates: int = 1, **keys) -> UpdatePlan:
    settings = AlgorithmConfig(**keys)
    c = collected(some)
    told = None
    if settings.repetition_coef:
        with solo() as world:
            told = repetition_penalties(plans.trajectories(c), settings, world)
    return plans.plan(c, settings, Moments(), num_updates=num_updates, penalties=told, **SIZES)[0]


def batches(some: list[Group], num_updates: int = 1, **keys) -> tuple[UpdatePlan, list[Batch]]:
    plan = plan_of(some, num_updates, **keys)
    with solo() as world:
        return plan, plans.redistribute(collected(some), plan, num_updates, Layout(world).data, world)


def columns(made: list[Batch], *names: str) -> dict[tuple[int, int], list[tuple[float, ...]]]:
    """The columns at the sampled tokens of each trajectory, in order, by (ticket, answer)."""
    found = defaultdict(list)
    for batch in made:
        at = [getattr(batch, name)[batch.sampled.index].tolist() for name in names]
        owner = torch.arange(batch.num_samples).repeat_interleave(batch.starts.diff())[batch.sampled.index]
        for row, *values in zip(owner.tolist(), *at, strict=True):
            ticket, number = batch.keys[row].tolist()
            found[ticket, number % SEGMENTS].append((number, *values))
    return {key: [values for _, *values in sorted(rows, key=lambda r: r[0])] for key, rows in found.items()}


MASKS = {
    "none": {},
    "shaped": {"overlong_coef": 1.0, "overlong_tokens": 60, "repetition_coef": 0.5, "repetition_ngram": 1},
    "normalised": {"norm_mean_type": "domain", "norm_std_type": "domain", "reward_clip": 1.0},
    "masked": {"error_max_len_clip": True, "error_max_len_threshold": 8, "pass_score": 9.0},
    "weighted": {"length_loss_weight": True, "difficulty_loss_weight": True},
    "varied": {"variance_top_p": 0.9, "variance_eps": 0.0},
}


@pytest.mark.parametrize("settings", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("advantage", ["grpo", "rloo", "opo", "reinforce_pp_baseline", "gigpo", "step_reinforce"])
def test_segments_train_as_the_whole_trajectory(advantage: str, settings: dict) -> None:
    """Equal advantages, weights and counts, token by token, in each of two mini-batches."""
    if advantage == "gigpo" and "norm_mean_type" in settings:
        settings = {}
    for agg in AGGREGATIONS if advantage == "grpo" else ["seq-mean-token-mean"]:
        keys = {"advantage": advantage, "loss_agg": agg, "loss_agg_length": 32, **settings}
        (a, whole), (b, cut) = (batches(groups(cut), 2, **keys) for cut in (False, True))
        for first, second in zip(whole, cut, strict=True):
            wanted, got = (columns([batch], "token_ids", "advantages", "weights") for batch in (first, second))
            assert wanted.keys() == got.keys() and wanted
            for key, rows in wanted.items():
                np.testing.assert_allclose(got[key], rows, rtol=1e-5, atol=1e-6)
        assert (a.num_answers, a.left_out, a.mean_reward) == pytest.approx((b.num_answers, b.left_out, b.mean_reward))
        assert len(b.keys) > b.num_answers == len(a.keys)
        assert {(t, n % SEGMENTS) for (t, n), _ in b.masked} == {key for key, _ in a.masked}
        assert bool(a.masked) == ("variance_top_p" in settings or "error_max_len_clip" in settings)


def test_an_aggregation_averages_over_trajectories_and_not_over_turns_or_segments() -> None:
    """Two trajectories, of 2 and of 10 tokens, the second in five turns and three segments."""
    some = [group(0, [trajectory(0, 0, [Step(1.0)]), trajectory(0, 1, [Step()] * 5, cuts=(1, 3))])]
    for agg, wanted in {
        "token-mean": (1 / 12, 1 / 12),
        "seq-mean-token-mean": (1 / 2 / 2, 1 / 2 / 10),
        "seq-mean-token-sum": (1 / 2, 1 / 2),
        "seq-mean-token-sum-norm": (1 / 2 / 40, 1 / 2 / 40),
    }.items():
        plan = plan_of(some, loss_agg=agg, loss_agg_length=40)
        assert plan.weights.tolist() == pytest.approx([wanted[0], *[wanted[1]] * 3]), agg


def test_an_advantage_of_a_turn_reaches_the_tokens_of_that_turn_alone() -> None:
    steps = [Step(1.0, 1, 2), Step(2.0, 2, 3), Step(4.0, 3, 1)]
    some = [group(0, [trajectory(0, 0, steps)])]
    plan, (batch,) = batches(some, advantage="step_reinforce", step_reward_gamma=0.5)
    assert plan.advantages.tolist() == [3.0, 4.0, 4.0] and plan.span_lengths.tolist() == [2, 3, 1]
    assert batch.advantages.tolist() == [0, 0, 0, 3, 3, 0, 0, 4, 4, 4, 0, 0, 4]
    assert len(batch.keys) == 1, "trained once, not once for each turn"


def test_what_the_rewards_of_steps_do_not_account_for_counts_with_the_last_one() -> None:
    """A rewarder's word on the whole episode, and penalties on it."""
    steps = [Step(1.0), Step(2.0)]
    some = [group(0, [trajectory(0, 0, steps, score=10.0), trajectory(0, 1, steps)])]
    keys = {"advantage": "step_reinforce", "step_reward_gamma": 0.0}
    assert plan_of(some, **keys).advantages.tolist() == [1.0, 9.0, 1.0, 2.0]
    assert plan_of(some, **keys, reward_scale=2.0, reward_shift=-1.0).advantages.tolist() == [2.0, 17.0, 2.0, 3.0]
    assert plan_of(some, **keys, reward_clip=5.0).advantages.tolist() == [1.0, 5.0, 1.0, 2.0]
    wrong = structs.replace(some[0], samples=tuple(trajectory(0, 0, steps, status="wrong_format")))
    assert plan_of([wrong], **keys, format_penalty=0.5).advantages.tolist() == [1.0, 1.5]


def test_norms_are_over_the_domain_and_over_the_returns_of_steps() -> None:
    some = [
        group(0, [trajectory(0, 0, [Step(1.0), Step(2.0)])], "small"),
        group(1, [trajectory(1, 0, [Step(100.0), Step(500.0)])], "large"),
        group(2, [trajectory(2, 0, [Step(3.0)])], "small"),
    ]
    keys = {"advantage": "step_reinforce", "step_reward_gamma": 1.0, "norm_mean_type": "domain"}
    small, large = (3 + 2 + 3) / 3, (600 + 500) / 2
    assert plan_of(some, **keys).advantages.tolist() == pytest.approx([3 - small, 2 - small, 50, -50, 3 - small])
    whole = plan_of(some, advantage="reinforce", norm_mean_type="domain")
    assert whole.advantages.tolist() == pytest.approx([0, 0, 0]) and large == 550


def test_an_answer_without_turns_of_an_agent_is_one_step() -> None:
    told = [Step(has_step=False), Step(has_step=False)]
    some = [group(0, [trajectory(0, 0, told, score=1.0), trajectory(0, 1, told, cuts=(1,), score=0.0)])]
    plain, stepped = (plan_of(some, advantage=name, norm_std=False) for name in ("grpo", "gigpo"))
    assert plain.advantages.tolist() == stepped.advantages.tolist() == [0.5, -0.5, -0.5]


def test_a_kl_in_the_reward_counts_with_the_turn_that_it_is_of() -> None:
    steps = [Step(1.0, num_tokens=2), Step(2.0, num_tokens=1)]
    keys = {"advantage": "step_reinforce", "step_reward_gamma": 0.5, "kl_reward_coef": 1.0}
    for cuts in ((), (1,)):
        plan, (batch,) = batches([group(0, [trajectory(0, 0, steps, cuts)])], **keys)
        index = batch.sampled.index
        batch.old_logprobs = torch.zeros(batch.num_tokens).index_copy(0, index, torch.tensor([1.0, 2.0, 4.0]))
        batch.ref_logprobs = torch.zeros(batch.num_tokens)
        some = collected([group(0, [trajectory(0, 0, steps, cuts)])])
        with solo() as world:
            plans.take_kl(some, [batch], plan, AlgorithmConfig(**keys), Layout(world).data)
        first, second = 1.0 - 3.0, 2.0 - 4.0
        assert batch.advantages[index].tolist() == pytest.approx([first + 0.5 * second] * 2 + [second])


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "topr", "kimi", "segment_clip", "ppo_clip"])
def test_a_sequence_level_loss_takes_a_trajectory_as_the_sequence(name: str) -> None:
    """Ratios and their gradients are those of the whole trajectory, however it is cut."""
    found = []
    for cut in (False, True):
        _, (batch,) = batches(groups(cut, num_groups=2), advantage="gigpo")
        place = batch.token_ids.double()
        batch.old_logprobs = (batch.rollout_logprobs + 0.3 * place.sin()) * batch.loss_mask
        logprobs = batch.rollout_logprobs[batch.sampled.index].double().requires_grad_()
        settings = AlgorithmConfig(loss=name, **KEYS[name])
        settings.correction = replace(settings.correction, level="geometric")
        loss, _ = bind_loss(settings)(logprobs, torch.zeros_like(logprobs), batch)
        loss.sum().backward()
        spread = torch.zeros(2, batch.num_tokens, dtype=torch.float64)
        spread[:, batch.sampled.index] = torch.stack([loss.detach(), logprobs.grad])
        batch.values, batch.returns = spread
        found.append(columns([batch], "token_ids", "values", "returns"))
    whole, segments = found
    assert whole.keys() == segments.keys()
    for key, rows in whole.items():
        np.testing.assert_allclose(segments[key], rows, rtol=1e-6, atol=1e-7)


def test_the_sample_log_has_a_row_for_each_segment_with_the_mean_advantage_of_its_tokens() -> None:
    steps = [Step(1.0, num_tokens=1), Step(2.0, num_tokens=3), Step(4.0)]
    c = collected([group(0, [trajectory(0, 0, steps, cuts=(2,)), trajectory(0, 1, steps, status="error")])])
    keys = {"advantage": "step_reinforce", "step_reward_gamma": 0.0}
    plan, _ = plans.plan(c, AlgorithmConfig(**keys), Moments(), num_updates=1, **SIZES)
    rows = list(sample_log.rows(c, plan))
    assert [(row.answer, row.advantage, row.reject_reason) for row in rows] == [
        (0, (1 + 3 * 2) / 4, None), (SEGMENTS, 4.0, None), (1, None, "no score"),
    ]  # fmt: skip


def test_a_masked_trajectory_is_masked_with_all_its_segments() -> None:
    some = [group(0, [trajectory(0, a, [Step(a), Step(0.0)], cuts=(1,)) for a in range(2)])]
    last = some[0].samples[-1]
    cut_off = structs.replace(last, turns=(structs.replace(last.turns[0], finish_reason="length"),))
    some = [structs.replace(some[0], samples=(*some[0].samples[:-1], cut_off))]
    plan = plan_of(some, max_len_mask=True, norm_std=False)
    assert plan.keys.tolist() == [[0, 0], [0, SEGMENTS]] and plan.advantages.tolist() == [-0.5, -0.5]
    assert plan.masked == (((0, 1), "truncated"), ((0, 1 + SEGMENTS), "truncated"))
    assert plan.left_out == 0.5 and plan.weights.tolist() == [1 / 4, 1 / 4]
