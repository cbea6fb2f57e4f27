"""Advantages, aggregation, KL and losses against float64 loops written from the papers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algo import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, LOSSES
from spmd_rl.algo.advantages import grpo
from spmd_rl.algo.losses import ppo_clip
from spmd_rl.config.sections import algorithm as schema


def grpo_by_hand(scores: list[float], groups: list[int], norm_std: bool) -> list[float]:
    out = []
    for score, group in zip(scores, groups, strict=True):
        peers = [s for s, g in zip(scores, groups, strict=True) if g == group]
        value = score - sum(peers) / len(peers)
        if norm_std:
            std = float(np.std(peers, ddof=1)) if len(peers) > 1 else 0.0
            value /= std + 1e-6
        out.append(value)
    return out


@given(rows=st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3)), min_size=1, max_size=20), norm_std=st.booleans())
def test_grpo_equals_the_paper(rows, norm_std) -> None:
    scores, groups = [r[0] for r in rows], [r[1] * 1000 for r in rows]
    ours = grpo(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), norm_std=norm_std)
    assert ours.tolist() == pytest.approx(grpo_by_hand(scores, groups, norm_std), rel=1e-6, abs=1e-7)


def test_grpo_of_nothing_and_of_equals() -> None:
    assert grpo(torch.tensor([], dtype=torch.float64), torch.tensor([], dtype=torch.int64)).numel() == 0
    equal = grpo(torch.ones(4, dtype=torch.float64), torch.tensor([1, 1, 1, 1]))
    assert equal.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "total"),
    [("token-mean", 1.0), ("seq-mean-token-mean", 1.0), ("seq-mean-token-sum", (3 + 5 + 1) / 3)],
)
def test_aggregation_weights(name: str, total: float) -> None:
    lengths = torch.tensor([3, 5, 1])
    weights = AGGREGATIONS[name](lengths)
    assert float((weights * lengths).sum()) == pytest.approx(total)
    assert AGGREGATIONS[name](torch.tensor([], dtype=torch.int64)).numel() == 0
    if name == "seq-mean-token-mean":
        assert (weights * lengths).tolist() == pytest.approx([1 / 3] * 3)


def test_ppo_clip_by_hand_and_its_gradient() -> None:
    new = torch.tensor([-1.0, -0.5, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 2.0, -1.0, -3.0], dtype=torch.float64)
    loss, quantities = ppo_clip(new, old, advantages, clip_low=0.2, clip_high=0.3)
    expected = []
    for n, o, a in zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True):
        ratio = math.exp(n - o)
        expected.append(-min(ratio * a, min(max(ratio, 0.8), 1.3) * a))
    assert loss.tolist() == pytest.approx(expected)
    assert quantities["actor/clipfrac"].tolist() == [0, 1, 1, 0]
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad[1] == 0 and new.grad[2] == 0, "a clipped token has no gradient"
    assert new.grad[0] == pytest.approx(-1.0)


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
def test_kl_is_zero_on_equals_and_near_the_truth(name: str) -> None:
    torch.manual_seed(0)
    p = torch.log_softmax(torch.randn(50, dtype=torch.float64), 0)
    q = torch.log_softmax(p + 0.1 * torch.randn(50, dtype=torch.float64), 0)
    assert KL_ESTIMATORS[name](p, p).abs().max() == 0
    truth = float((p.exp() * (p - q)).sum())
    mean = float((p.exp() * KL_ESTIMATORS[name](p, q)).sum())
    assert mean == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (schema.ADVANTAGES, ADVANTAGES),
        (schema.LOSSES, LOSSES),
        (schema.LOSS_AGGS, AGGREGATIONS),
        (schema.KL_ESTIMATORS, KL_ESTIMATORS),
    ],
)
def test_settings_know_the_names(names, known) -> None:
    """The settings are torch-free, so they keep a copy."""
    assert names == tuple(known)
