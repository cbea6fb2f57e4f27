"""pass@k and maj@k against all subsets, and the interval of a mean against a simulation."""

import random
from itertools import combinations
from statistics import fmean

import pytest

from spmd_rl.algo.estimators import half_width, maj_at_k, pass_at_k


def majority(subset: list[tuple[str, float]]) -> float:
    counts: dict[str, list[float]] = {}
    for vote, score in subset:
        if vote:
            counts.setdefault(vote, []).append(score)
    top = max(map(len, counts.values()), default=0)
    return fmean([fmean(scores) for scores in counts.values() if len(scores) == top]) if top else 0.0


@pytest.mark.parametrize("num_right", range(8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(num_right: int) -> None:
    answers = [n < num_right for n in range(7)]
    for k in range(1, 8):
        subsets = list(combinations(answers, k))
        assert pass_at_k(7, num_right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-14)


@pytest.mark.parametrize("seed", range(20))
def test_maj_at_k_is_the_mean_over_all_subsets(seed: int) -> None:
    draw = random.Random(seed)
    num_votes, n = draw.randint(1, 5), draw.randint(1, 9)
    score_of = {f"v{i}": draw.choice([0.0, 0.5, 1.0]) for i in range(num_votes)} | {"": 0.0}
    votes = [(vote, score_of[vote]) for vote in draw.choices(list(score_of), k=n)]
    ks = range(1, n + 1)
    expected = [fmean(majority(list(subset)) for subset in combinations(votes, k)) for k in ks]
    assert maj_at_k(votes, ks) == pytest.approx(expected, abs=1e-12)


def test_a_vote_of_many_is_exact_too() -> None:
    """All of 64 answers are one subset; and one answer of them is right as often as answers are."""
    votes = [("a", 1.0)] * 24 + [("b", 0.0)] * 23 + [(f"c{i}", 0.0) for i in range(17)]
    assert maj_at_k(votes, [1, 64]) == pytest.approx([24 / 64, 1.0], abs=1e-12)


def test_the_interval_holds_the_truth_19_times_in_20() -> None:
    draw, held = random.Random(0), 0
    for _ in range(2000):
        means = [fmean(draw.random() < chance for _ in range(4)) for chance in [draw.random() for _ in range(100)]]
        held += abs(fmean(means) - 0.5) <= half_width(means)
    assert 0.93 < held / 2000 < 0.97
    assert half_width([1.0]) is None
