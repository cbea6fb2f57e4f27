"""KL estimators against the exact divergence, their gradients against its gradient, and the adaptive coefficient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algo.kl import KL_ESTIMATORS, adaptive_coef

VOCABULARY = 40


def logits(requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    q = p + 0.3 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    return p.requires_grad_(requires_grad), q


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    total = 0.0
    for logp, logq in zip(p.log_softmax(0).tolist(), q.log_softmax(0).tolist(), strict=True):
        total += math.exp(logp) * (logp - logq)
    return total


FORMULAS = {
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q - p) - (q - p) - 1 if q < p else min(10, math.exp(q - p) - (q - p) - 1),
    "abs": lambda p, q: abs(p - q),
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@given(pairs=st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), max_size=9))
@settings(deadline=None)
def test_each_equals_its_formula(name: str, pairs: list[tuple[float, float]]) -> None:
    p, q = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    expected = [FORMULAS[name](*pair) for pair in pairs]
    assert KL_ESTIMATORS[name](p, q).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert not KL_ESTIMATORS[name](p, p).any()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_unbiased_have_the_exact_mean(name: str) -> None:
    p, q = logits()
    logp, logq = p.log_softmax(0), q.log_softmax(0)
    assert float((logp.exp() * KL_ESTIMATORS[name](logp, logq)).sum()) == pytest.approx(divergence(p, q), rel=1e-12)


@pytest.mark.parametrize(("name", "truth"), [("k1", "none"), ("k2", "forward"), ("k3", "reverse")])
def test_gradients_in_the_loss_are_what_the_docstrings_say(name: str, truth: str) -> None:
    """In expectation under the policy, which itself is not differentiated: that is what a loss over samples does."""
    p, q = logits(requires_grad=True)
    logp, logq = p.log_softmax(0), q.log_softmax(0)
    (ours,) = torch.autograd.grad((logp.exp().detach() * KL_ESTIMATORS[name](logp, logq)).sum(), p, retain_graph=True)
    exact = {
        "none": 0 * logp.sum(),
        "forward": (logp.exp() * (logp - logq)).sum(),
        "reverse": (logq.exp() * (logq - logp)).sum(),
    }
    (expected,) = torch.autograd.grad(exact[truth], p)
    assert torch.allclose(ours, expected, atol=1e-12)
    assert truth == "none" or expected.abs().max() > 1e-3


def test_none_hides_an_impossible_token() -> None:
    p, q = torch.tensor([-1.0]), torch.tensor([-math.inf])
    assert all(float(estimate(p, q)) == math.inf for estimate in KL_ESTIMATORS.values())


def test_k3_pulls_back_however_far_a_token_has_become_likelier_and_is_bounded_the_other_way() -> None:
    p = torch.tensor([-0.5, -0.1, -9.0, -14.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-11.0, -40.0, -7.0, -1.0], dtype=torch.float64)
    found = KL_ESTIMATORS["k3"](p, q)
    (gradient,) = torch.autograd.grad(found.sum(), p)
    assert found.tolist() == pytest.approx([9.5000275, 38.9, math.exp(2) - 3, 10.0], rel=1e-7)
    assert gradient.tolist() == pytest.approx([1.0, 1.0, 1 - math.exp(2), 0.0], abs=1e-4)


def test_adaptive_coefficient() -> None:
    keys = {"target_kl": 6.0, "kl_horizon": 10000}
    assert adaptive_coef(0.2, 6.0, 256, **keys) == 0.2
    assert adaptive_coef(0.2, 6.6, 256, **keys) == pytest.approx(0.2 * (1 + 0.1 * 256 / 10000))
    assert adaptive_coef(0.2, 600.0, 256, **keys) == pytest.approx(0.2 * (1 + 0.2 * 256 / 10000)), "bounded above"
    assert adaptive_coef(0.2, -6.0, 256, **keys) == pytest.approx(0.2 * (1 - 0.2 * 256 / 10000)), "and below"
    coef = 0.2
    for _ in range(4000):
        coef = adaptive_coef(coef, 3.0 / coef, 256, **keys)  # a policy that goes as far as the coefficient lets it
    assert coef == pytest.approx(0.5, rel=1e-3), "where the KL is on target"
