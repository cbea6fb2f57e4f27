"""Scores before advantages: shaping, what is left out of the loss and why, weights, and the greedy baseline."""

import pytest
import torch
from msgspec.structs import replace

from spmd_rl.algo.moments import Moments
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.distributed import solo
from spmd_rl.learn import sample_log
from spmd_rl.learn.advantages import StepTable, mask, repetition_penalties, shape
from spmd_rl.types import Group, Verdict
from tests import plans
from tests.unit.test_prepare import GROUPS, collected, group, planned


def shaped(groups: list[Group], running: Moments | None = None, max_tokens: int = 8, **settings):
    data = StepTable.of(collected(groups).table)
    scored, moments = shape(data, AlgorithmConfig(overlong_tokens=4, **settings), running or Moments(), max_tokens)
    return scored.scores.tolist(), moments


def reasons(groups: list[Group], **settings) -> dict[int, str]:
    return mask(StepTable.of(collected(groups).table), AlgorithmConfig(**settings))[0]


def truncated(g: Group, answer: int) -> Group:
    """The same group with this answer cut off at the limit."""
    samples = list(g.samples)
    turn = replace(samples[answer].turns[0], finish_reason="length")
    samples[answer] = replace(samples[answer], turns=(turn,))
    return replace(g, samples=tuple(samples))


def test_unshaped_scores_are_the_verdicts() -> None:
    assert shaped(GROUPS)[0] == [1.0, 0.0, 0.5, 0.0, 1.0, 0.0]


def test_scale_penalties_and_clip_in_this_order() -> None:
    wrong = replace(GROUPS[1], samples=(replace(GROUPS[1].samples[0], verdict=Verdict("wrong_format", 0.5)),))
    got, _ = shaped([group(1, [(8, 1.0), (6, 0.0)]), wrong], reward_scale=2, reward_shift=1, overlong_coef=1.0,
                    format_penalty=0.25, reward_clip=1.6)  # fmt: skip
    assert got == pytest.approx([min(1.6, 3 - 1.0), 1 - 0.5, min(1.6, 2 - 0.25 - 0.25)])


def test_running_moments_go_on_from_step_to_step() -> None:
    first, moments = shaped([group(1, [(1, 3.0), (1, 5.0)])], norm_mean_type="running")
    assert first == [-1.0, 1.0]
    second, moments = shaped([group(2, [(1, 4.0), (1, 8.0)])], moments, norm_mean_type="running")
    assert second == [-1.0, 3.0] and moments.count == 4
    assert shaped([group(2, [(1, 4.0)])], moments, norm_mean_type="batch")[1] is moments, "kept only where it is read"


def test_masks_give_their_reasons() -> None:
    groups = [truncated(group(1, [(3, 1.0), (9, 0.0)]), 0), group(2, [(1, 1.0), (1, 1.0)])]
    assert reasons(groups) == {}
    assert reasons(groups, max_len_mask=True) == {0: "truncated"}
    assert reasons(groups, difficulty_mask=True) == {2: "too easy or too hard", 3: "too easy or too hard"}
    long = {"error_max_len_clip": True, "error_max_len_threshold": 9}
    assert reasons(groups, max_len_mask=True, **long) == {0: "truncated", 1: "long and wrong"}


def test_what_is_masked_stays_in_the_baseline_and_leaves_the_divisor() -> None:
    groups = [truncated(group(1, [(3, 1.0), (5, 0.0)]), 0)]
    plan = planned(groups, max_len_mask=True, norm_std=False)
    assert plan.keys.tolist() == [[1, 1]] and plan.advantages.tolist() == [-0.5]
    assert plan.weights.tolist() == pytest.approx([1 / 5])
    assert plan.masked == (((1, 0), "truncated"),)
    rows = list(sample_log.rows(collected(groups), plan))
    assert [(row.kept, row.reject_reason) for row in rows] == [(False, "truncated"), (True, None)]


def test_loss_weights_have_mean_one() -> None:
    data = StepTable.of(collected([group(1, [(2, 1.0), (6, 0.0)]), group(2, [(4, 0.0), (4, 0.0)])]).table)
    _, weights = mask(data, AlgorithmConfig(length_loss_weight=True, difficulty_loss_weight=True))
    raw = torch.tensor([1.5 * 1.25, 0.5 * 1.25, 1.0 * 2.0, 1.0 * 2.0])
    assert weights.tolist() == pytest.approx((raw / raw.mean()).tolist())
    plan = planned([group(1, [(2, 1.0), (6, 0.0)])], length_loss_weight=True)
    assert plan.weights.tolist() == pytest.approx([1.5 / 8, 0.5 / 8])
    cut_off = StepTable.of(
        collected([truncated(group(1, [(2, 1.0), (6, 0.0)]), 0), group(2, [(4, 0.0), (4, 0.0)])]).table
    )
    _, some = mask(cut_off, AlgorithmConfig(length_loss_weight=True, max_len_mask=True))
    assert len(some) == 3 and some.mean() == pytest.approx(1.0), "those that do not train have no part in the mean"


def test_the_greedy_answer_is_a_baseline_and_never_trains() -> None:
    groups = [group(1, [(2, 1.0), (2, 0.0), (2, 0.75)]), group(2, [(2, 1.0), (2, 0.0), (2, None)])]
    settings = AlgorithmConfig(advantage="remax", reward_scale=2)
    sizes = {"num_updates": 1, "num_shards": 1, "hidden_size": 64, "max_tokens": 8}
    plan, _ = plans.plan(collected(groups), settings, Moments(), greedy_answer=2, **sizes)
    assert plan.keys.tolist() == [[1, 0], [1, 1]] and plan.advantages.tolist() == [0.5, -1.5]
    no_score = [((2, answer), "no greedy score") for answer in (0, 1)]
    assert plan.masked == (((1, 2), "greedy baseline"), *no_score)


def test_repetition_is_told_by_the_rank_that_holds_the_answer() -> None:
    """Tokens of a test sample never repeat; those of two equal turns do."""
    g = group(3, [(4, 1.0), (2, 0.0)])
    twice = replace(g, samples=(g.samples[0], replace(g.samples[1], turns=g.samples[1].turns * 2)))
    settings = AlgorithmConfig(repetition_coef=0.5, repetition_ngram=1)
    with solo() as world:
        told = repetition_penalties(plans.trajectories(collected([twice])), settings, world)
    assert told == {(3, 0): 0.0, (3, 1): -0.25}
    sizes = {"num_updates": 1, "num_shards": 1, "hidden_size": 64, "max_tokens": 8}
    plan, _ = plans.plan(collected([twice]), settings, Moments(), penalties=told, **sizes)
    assert plan.mean_reward == pytest.approx((1.0 - 0.25) / 2)
