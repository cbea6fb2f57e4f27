"""Advantages of samples against loops written from the papers, on random and on degenerate batches."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algo.advantages import ADVANTAGES, TOKEN_ADVANTAGES
from spmd_rl.algo.inputs import Scored

Row = tuple[float, int, int, float]  # score, group, length, greedy score
EPS = 1e-6


def scored(rows: list[Row]) -> Scored:
    scores, groups, lengths, greedy = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Scored(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int64),
        torch.tensor(greedy, dtype=torch.float64),
    )


def std(values: list[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def peers(rows: list[Row], i: int) -> list[int]:
    return [j for j in range(len(rows)) if rows[j][1] == rows[i][1]]


def grpo(rows: list[Row], i: int) -> float:
    scores = [rows[j][0] for j in peers(rows, i)]
    return (rows[i][0] - np.mean(scores)) / (std(scores) + EPS)


def dr_grpo(rows: list[Row], i: int) -> float:
    return rows[i][0] - np.mean([rows[j][0] for j in peers(rows, i)])


def rloo(rows: list[Row], i: int) -> float:
    others = [rows[j][0] for j in peers(rows, i) if j != i]
    return rows[i][0] - np.mean(others) if others else 0.0


def reinforce(rows: list[Row], i: int) -> float:
    return rows[i][0]


def remax(rows: list[Row], i: int) -> float:
    return rows[i][0] - rows[i][3]


def opo(rows: list[Row], i: int) -> float:
    group = [rows[j] for j in peers(rows, i)]
    return rows[i][0] - sum(r[0] * r[2] for r in group) / sum(r[2] for r in group)


def lite_ppo(rows: list[Row], i: int) -> float:
    return dr_grpo(rows, i) / (std([r[0] for r in rows]) + EPS)


def reinforce_pp_baseline(rows: list[Row], i: int) -> float:
    tokens = [dr_grpo(rows, j) for j in range(len(rows)) for _ in range(rows[j][2])]
    return (dr_grpo(rows, i) - np.mean(tokens)) / (std(tokens) + EPS)


def maxrl(rows: list[Row], i: int) -> float:
    mean = np.mean([rows[j][0] for j in peers(rows, i)])
    return (rows[i][0] - mean) / mean if mean > 0 else 0.0


BY_HAND: dict[str, tuple[Callable[[list[Row], int], float], dict[str, object]]] = {
    "grpo": (grpo, {"norm_std": True}),
    "dr_grpo": (dr_grpo, {}),
    "rloo": (rloo, {}),
    "reinforce": (reinforce, {}),
    "remax": (remax, {}),
    "opo": (opo, {}),
    "lite_ppo": (lite_ppo, {}),
    "maxrl": (maxrl, {}),
    "reinforce_pp_baseline": (reinforce_pp_baseline, {}),
}
CENTRED = ("grpo", "dr_grpo", "rloo", "opo", "lite_ppo", "reinforce_pp_baseline", "maxrl")
# A grid keeps standard deviations away from rounding, where a division by (std + 1e-6) magnifies it.
SCORE = st.integers(-8, 8).map(lambda n: n / 4)
ROWS = st.lists(st.tuples(SCORE, st.integers(0, 3), st.integers(1, 9), SCORE), min_size=1, max_size=16)


@pytest.mark.parametrize("name", BY_HAND)
@given(rows=ROWS)
@settings(max_examples=60, deadline=None)
def test_equals_the_paper(name: str, rows: list[Row]) -> None:
    by_hand, keys = BY_HAND[name]
    ours = ADVANTAGES[name](scored(rows), **keys)
    assert ours.dtype == torch.float64
    assert ours.tolist() == pytest.approx([by_hand(rows, i) for i in range(len(rows))], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", CENTRED)
def test_without_a_difference_there_is_exactly_no_advantage(name: str) -> None:
    keys = BY_HAND[name][1]
    for score in (0.1, 1 / 3, 1e9):
        equal = ADVANTAGES[name](scored([(score, 7, length, 0.0) for length in (3, 5, 9)]), **keys)
        assert equal.tolist() == [0, 0, 0], score
    alone = ADVANTAGES[name](scored([(0.7, 1, 4, 0.0), (0.3, 2, 6, 0.0)]), **keys)
    assert alone.tolist() == [0, 0], "groups of one"
    assert ADVANTAGES[name](scored([(0.3, 0, 4, 0.0)]), **keys).tolist() == [0], "one sample"


@pytest.mark.parametrize("name", BY_HAND)
def test_nothing_gives_nothing(name: str) -> None:
    assert ADVANTAGES[name](scored([]), **BY_HAND[name][1]).numel() == 0


@pytest.mark.parametrize("name", BY_HAND)
def test_order_and_group_numbers_do_not_matter(name: str) -> None:
    rows = [(float(np.sin(i)), i % 3, i % 5 + 1, 0.5) for i in range(12)]
    order = list(np.random.default_rng(0).permutation(12))
    plain = ADVANTAGES[name](scored(rows), **BY_HAND[name][1])
    moved = ADVANTAGES[name](scored([(rows[i][0], 900 - rows[i][1], *rows[i][2:]) for i in order]), **BY_HAND[name][1])
    assert moved.tolist() == pytest.approx(plain[order].tolist(), rel=1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_a_failed_verdict_leaves_its_groups_baseline(name: str) -> None:
    """Such a sample is not among the scored ones: its mates get what they would get had it never been asked for."""
    group, other = [(1.0, 0, 3, 0.0), (0.0, 0, 5, 0.0), (1.0, 0, 4, 0.0)], [(0.5, 1, 2, 0.0), (0.0, 1, 2, 0.0)]
    with_other, alone = (ADVANTAGES[name](scored(r), **BY_HAND[name][1]) for r in (group + other, group))
    assert with_other[:3].tolist() == pytest.approx(alone.tolist(), rel=1e-15)
    as_zero = ADVANTAGES[name](scored([*group, (0.0, 0, 6, 0.0)]), **BY_HAND[name][1])
    assert as_zero[0] != pytest.approx(alone[0]), "a zero in its place would move the baseline"


def test_an_infinite_score_is_refused() -> None:
    for score in (math.inf, -math.inf, math.nan):
        with pytest.raises(AssertionError, match="not finite"):
            scored([(score, 0, 1, 0.0)])


def test_remax_and_gigpo_say_what_they_miss() -> None:
    plain = Scored(torch.zeros(1).double(), torch.zeros(1).long(), torch.ones(1).long())
    with pytest.raises(AssertionError, match="greedy"):
        ADVANTAGES["remax"](plain)
    with pytest.raises(AssertionError, match="agentic"):
        ADVANTAGES["gigpo"](
            plain,
            norm_std=True,
            norm_over_steps=False,
            step_reward_gamma=1.0,
            episode_reward_weight=1.0,
            step_reward_weight=1.0,
        )


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
def test_maxrl_climbs_the_likelihood_as_far_as_n_answers_tell(n: int, chance: float) -> None:
    """Expectation over all outcomes of n answers that are right with a chance p, of the gradient by p."""
    expected = 0.0
    for outcome in product((0.0, 1.0), repeat=n):
        ours = ADVANTAGES["maxrl"](scored([(right, 0, 1, 0.0) for right in outcome])).tolist()
        slopes = [1 / chance if right else -1 / (1 - chance) for right in outcome]  # of the logprob of each
        weight = math.prod(chance if right else 1 - chance for right in outcome)
        expected += weight * sum(a * s for a, s in zip(ours, slopes, strict=True)) / n
    assert expected == pytest.approx(sum((1 - chance) ** (k - 1) for k in range(1, n)), rel=1e-9)


PARTS = st.lists(st.tuples(st.integers(0, 3), SCORE, SCORE), min_size=1, max_size=16)


def with_parts(rows: list[tuple[int, float, float]]) -> Scored:
    """Groups and two rewards of each answer, whose sum the estimator has no use for."""
    groups, a, b = zip(*rows, strict=True)
    terms = {name: torch.tensor(values, dtype=torch.float64) for name, values in (("a", a), ("b", b))}
    return replace(scored([(9.0, number, 1, 0.0) for number in groups]), terms=terms)


@given(rows=PARTS)
@settings(max_examples=60, deadline=None)
def test_gdpo_normalises_each_reward_by_itself_and_then_the_batch(rows: list[tuple[int, float, float]]) -> None:
    weights = {"b": 0.5, "a": 2.0}

    def term(i: int, column: int) -> float:
        group = [row[column] for row in rows if row[0] == rows[i][0]]
        return (rows[i][column] - np.mean(group)) / (std(group) + EPS)

    sums = [2.0 * term(i, 1) + 0.5 * term(i, 2) for i in range(len(rows))]
    wanted = [(one - np.mean(sums)) / (std(sums) + EPS) for one in sums]
    ours = ADVANTAGES["gdpo"](with_parts(rows), reward_weights=weights)
    assert ours.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_gdpo_tells_apart_what_the_sum_does_not() -> None:
    """The paper's own case: totals of 0 and 2 against 0 and 1 are alike to GRPO; and equal answers teach nothing."""
    two, one = [(0, 0.0, 0.0), (0, 1.0, 1.0)], [(1, 0.0, 0.0), (1, 1.0, 0.0)]
    ours = ADVANTAGES["gdpo"](with_parts(two + one), reward_weights={"a": 1.0, "b": 1.0})
    assert float(ours[1]) == pytest.approx(2 * float(ours[3]), rel=1e-5)
    summed = ADVANTAGES["grpo"](scored([(a + b, g, 1, 0.0) for g, a, b in two + one]), norm_std=True)
    assert float(summed[1]) == pytest.approx(float(summed[3]), rel=1e-5)
    equal = ADVANTAGES["gdpo"](with_parts([(0, 0.1, 1 / 3)] * 3), reward_weights={"a": 1.0, "b": 1.0})
    assert equal.tolist() == [0, 0, 0]


def pass_at_k(right: list[bool], k: int) -> list[float]:
    """The definition: every subset of k is a group with reward 1 if one is right; an answer has its subsets' mean."""
    n = len(right)
    subsets = list(combinations(range(n), min(k, n)))
    rewards = [float(any(right[i] for i in subset)) for subset in subsets]
    mean, deviation = np.mean(rewards), np.std(rewards)
    if deviation == 0:
        return [0.0] * n
    return [
        float(np.mean([(r - mean) / deviation for r, s in zip(rewards, subsets, strict=True) if i in s]))
        for i in range(n)
    ]


@given(groups=st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=3), k=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_mean_over_all_subsets(groups: list[list[bool]], k: int) -> None:
    rows = [(float(right), number, 1, 0.0) for number, group in enumerate(groups) for right in group]
    ours = ADVANTAGES["pass_at_k"](scored(rows), pass_k=k, pass_score=0.5)
    assert ours.tolist() == pytest.approx([a for group in groups for a in pass_at_k(group, k)], abs=1e-9)


def test_a_score_at_the_pass_score_is_right() -> None:
    rows = [(score, 0, 1, 0.0) for score in (0.9, 0.8, 0.8, -1.0)]
    for pass_score, right in ((0.9, 1), (0.8, 3), (0.0, 3), (1.0, 0)):
        ours = ADVANTAGES["pass_at_k"](scored(rows), pass_k=1, pass_score=pass_score)
        assert int((ours > 0).sum()) == right, pass_score


def test_no_name_stands_for_two_estimators() -> None:
    assert not set(ADVANTAGES) & set(TOKEN_ADVANTAGES)
    assert set(ADVANTAGES) == {*BY_HAND, "pass_at_k", "gdpo", "starpo", "step_reinforce", "gigpo"}, (
        "each has a reference"
    )
