"""Score shaping, masks and loss weights against their formulas."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algo.advantages import ADVANTAGES
from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.moments import Moments
from spmd_rl.algo.shaping import (
    clip,
    difficulty_mask,
    difficulty_weight,
    error_max_len_mask,
    format_penalty,
    length_weight,
    max_len_mask,
    mean_one,
    normalise,
    overlong_penalty,
    repetition_penalty,
    scale_shift,
    variance_mask,
)
from spmd_rl.config.sections.algorithm import NORMS

SCORES = torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 3.0], dtype=torch.float64)
GROUPS = torch.tensor([4, 4, 4, 9, 9, 7])
DOMAINS = GROUPS % 2


def test_scale_shift_and_clip() -> None:
    assert scale_shift(SCORES, reward_scale=2.0, reward_shift=-1.0).tolist() == [1, -1, 0, 3, -3, 5]
    assert clip(SCORES, 1.5).tolist() == [1, 0, 0.5, 1.5, -1, 1.5]
    assert clip(torch.tensor([torch.inf, -torch.inf]), 2.0).tolist() == [2, -2]


@given(
    lengths=st.lists(st.integers(0, 120), max_size=9),
    limit=st.integers(1, 100),
    cache=st.integers(0, 100),
    coef=st.floats(0, 3),
)
@settings(deadline=None)
def test_overlong_penalty_is_equation_13(lengths: list[int], limit: int, cache: int, coef: float) -> None:
    def by_hand(length: int) -> float:
        if length <= limit - cache:
            return 0.0
        return ((limit - cache) - length) / cache if length <= limit else -1.0

    ours = overlong_penalty(torch.tensor(lengths, dtype=torch.int64), limit, overlong_tokens=cache, overlong_coef=coef)
    assert ours.tolist() == pytest.approx([coef * by_hand(length) for length in lengths])
    edges = torch.tensor([limit, limit + 1])
    hard = overlong_penalty(edges, limit, overlong_tokens=0, overlong_coef=coef)
    assert hard.tolist() == [0, -coef], "without a cache the limit itself is free"


@given(ids=st.lists(st.integers(0, 3), max_size=20), n=st.integers(1, 5))
@settings(deadline=None)
def test_repetition_penalty_counts_ngrams(ids: list[int], n: int) -> None:
    ngrams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    expected = -0.5 * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0
    ours = repetition_penalty(torch.tensor(ids, dtype=torch.int64), repetition_ngram=n, repetition_coef=0.5)
    assert ours == pytest.approx(expected)


def test_format_penalty() -> None:
    assert format_penalty(torch.tensor([True, False]), format_penalty=0.25).tolist() == [-0.25, 0]


@pytest.mark.parametrize("mean", NORMS)
@pytest.mark.parametrize("std", NORMS)
def test_normalise_over_each_scope(mean: str, std: str) -> None:
    running = Moments(10.0, 0.25, 36.0)

    def members(i: int, scope: str) -> np.ndarray:
        parts = {"group": GROUPS, "domain": DOMAINS}.get(scope, torch.zeros_like(GROUPS)).numpy()
        return SCORES.numpy()[parts == parts[i]]

    expected = []
    for i, score in enumerate(SCORES.tolist()):
        centre = {"none": 0.0, "running": 0.25}.get(mean, members(i, mean).mean())
        over = members(i, std)
        width = {"none": 0.0, "running": 2.0}.get(std, over.std(ddof=1) if len(over) > 1 else 0.0)
        expected.append((score - centre) / (width + 1e-6) if width else score - centre)
    ours = normalise(SCORES, GROUPS, running, DOMAINS, norm_mean_type=mean, norm_std_type=std)
    assert ours.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mean", NORMS)
@pytest.mark.parametrize("std", NORMS)
def test_normalise_stays_finite(mean: str, std: str) -> None:
    for scores in (torch.full((4,), 0.1, dtype=torch.float64), SCORES[:1], SCORES[:0]):
        groups = torch.zeros(len(scores), dtype=torch.int64)
        ours = normalise(scores, groups, Moments.of(scores), groups, norm_mean_type=mean, norm_std_type=std)
        assert ours.isfinite().all()
        assert ours.tolist() == (scores if mean == "none" else torch.zeros_like(scores)).tolist()


def test_group_and_batch_norms_are_grpo_and_lite_ppo() -> None:
    scored = Scored(SCORES, GROUPS, torch.ones_like(GROUPS))
    by_group = normalise(SCORES, GROUPS, Moments(), norm_mean_type="group", norm_std_type="group")
    assert by_group.tolist() == pytest.approx(ADVANTAGES["grpo"](scored, norm_std=True).tolist())
    mixed = normalise(SCORES, GROUPS, Moments(), norm_mean_type="group", norm_std_type="batch")
    assert mixed.tolist() == pytest.approx(ADVANTAGES["lite_ppo"](scored).tolist())


def variance_loop(scores: list[float], groups: list[int], top_p: float, eps: float) -> list[bool]:
    """Groups by falling variance, ties by number, until what they hold reaches the share."""
    by_group = {g: [s for s, h in zip(scores, groups, strict=True) if h == g] for g in sorted(set(groups))}
    variances = {g: float(np.std(some, ddof=1)) if len(some) > 1 else 0.0 for g, some in by_group.items()}
    kept, held, wanted = set(), 0.0, top_p * sum(variances.values()) - eps
    for g in sorted(variances, key=lambda g: -variances[g]):
        if held < wanted and variances[g] > 0:
            kept.add(g)
            held += variances[g]
    return [g in kept for g in groups]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("eps", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_variance_filter_is_the_loop(top_p: float, eps: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    groups = np.sort(draw.integers(0, 6, 20)).tolist()
    scores = draw.normal(0, 1, 20).tolist()
    scores = [0.25 if g == 3 else s for s, g in zip(scores, groups, strict=True)]
    ours = variance_mask(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), variance_top_p=top_p, variance_eps=eps
    )
    assert ours.tolist() == variance_loop(scores, groups, top_p, eps)


def test_the_variance_filter_goes_by_deviations_as_the_code_of_ragen_2() -> None:
    scores = [[1.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0], [0.2, 0.0, 0.0, 0.0], [0.05, 0.0, 0.0, 0.0]]
    groups = torch.arange(4).repeat_interleave(4)
    kept = variance_mask(torch.tensor(scores).double().flatten(), groups, variance_top_p=0.9, variance_eps=0.01)
    assert kept.view(4, 4)[:, 0].tolist() == [True, True, True, False], "two of them hold 0.9 of all variance"


def test_the_variance_filter_of_nothing_and_of_nothing_that_varies() -> None:
    keys = {"variance_top_p": 0.9, "variance_eps": 0.01}
    assert not variance_mask(torch.ones(4).double(), torch.tensor([0, 0, 1, 1]), **keys).any()
    assert variance_mask(torch.ones(0).double(), torch.zeros(0, dtype=torch.int64), **keys).numel() == 0


def test_masks() -> None:
    assert max_len_mask(torch.tensor([True, False])).tolist() == [False, True]
    binary, groups = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]).double(), torch.tensor([0, 0, 1, 1, 2, 2, 3])
    band = {"difficulty_low_threshold": 0.0, "difficulty_high_threshold": 1.0}
    assert difficulty_mask(binary, groups, **band).tolist() == [False, False, True, True, False, False, True]
    thirds = torch.full((3,), 1 / 3, dtype=torch.float64)
    band = {"difficulty_low_threshold": 1 / 3, "difficulty_high_threshold": 1.0}
    assert not difficulty_mask(thirds, torch.zeros(3, dtype=torch.int64), **band).any(), "the bounds are outside"
    keep = error_max_len_mask(
        torch.tensor([1.0, 0.9, 0.0, 0.0], dtype=torch.float64),
        torch.tensor([99, 99, 99, 9]),
        error_max_len_threshold=50,
        pass_score=0.9,
    )
    assert keep.tolist() == [True, True, False, True]


def test_loss_weights() -> None:
    difficulty = torch.tensor([-1.0, 0.0, 0.5, 1.0, 7.0]).double()
    assert difficulty_weight(difficulty).tolist() == [0.5, 0.5, 1.25, 2.0, 2.0]
    assert length_weight(torch.tensor([10, 20, 30])).tolist() == [1.5, 1.0, 0.5]
    assert length_weight(torch.tensor([7, 7])).tolist() == [1.5, 1.5]
    assert mean_one(length_weight(torch.tensor([7, 7]))).tolist() == [1, 1]
    assert mean_one(torch.tensor([1.0, 3.0])).tolist() == [0.5, 1.5]
    empty = torch.zeros(0, dtype=torch.int64)
    assert mean_one(length_weight(empty)).numel() == 0
