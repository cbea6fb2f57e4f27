"""Token-level estimators, whitening and the critic's loss against float64 loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algo.advantages import TOKEN_ADVANTAGES
from spmd_rl.algo.advantages.tokens import discounted_sums, token_rewards
from spmd_rl.algo.moments import Moments, merged, whiten
from spmd_rl.algo.values import explained_variance, value_loss
from spmd_rl.config.sections.algorithm import TOKEN_ADVANTAGES as KEYS

LENGTHS = st.lists(st.integers(1, 13), min_size=1, max_size=6)
DISCOUNT = st.sampled_from([0.0, 0.3, 0.95, 0.99, 1.0])


def packed(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    return rewards, values, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    advantages, following, advantage = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        advantages.insert(0, advantage)
    return advantages


def split(values: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    return [part.tolist() for part in values.split(lengths)]


@given(lengths=LENGTHS, gamma=DISCOUNT, lam=DISCOUNT, seed=st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_gae_equals_the_loop(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rewards, values, samples = packed(lengths, seed)
    advantages, returns = TOKEN_ADVANTAGES["gae"](rewards, values, samples, gamma=gamma, lam=lam)
    expected = [
        a for r, v in zip(split(rewards, lengths), split(values, lengths), strict=True) for a in gae(r, v, gamma, lam)
    ]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert (returns - values).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(lengths=LENGTHS, gamma=DISCOUNT)
@settings(max_examples=40, deadline=None)
def test_reinforce_returns_are_gae_without_a_critic(lengths: list[int], gamma: float) -> None:
    rewards, _, samples = packed(lengths)
    advantages, returns = TOKEN_ADVANTAGES["reinforce_returns"](rewards, None, samples, gamma=gamma)
    expected = [a for r in split(rewards, lengths) for a in gae(r, [0.0] * len(r), gamma, 1.0)]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert torch.equal(advantages, returns)


@pytest.mark.parametrize("name", TOKEN_ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_does_not_feel_its_neighbours(name: str, dtype: torch.dtype) -> None:
    lengths, keys = [5, 1, 12, 3], {key: 0.9 - 0.1 * (key == "lam") for key in KEYS[name]}
    rewards, values, samples = (t.to(dtype) if t.is_floating_point() else t for t in packed(lengths))
    together = TOKEN_ADVANTAGES[name](rewards, values, samples, **keys)[0]
    assert together.dtype == dtype
    parts = zip(rewards.split(lengths), values.split(lengths), samples.split(lengths), strict=True)
    alone = torch.cat([TOKEN_ADVANTAGES[name](*part, **keys)[0] for part in parts])
    assert torch.equal(together, alone)
    empty = TOKEN_ADVANTAGES[name](rewards[:0], values[:0], samples[:0], **keys)[0]
    assert empty.numel() == 0


def test_the_end_is_not_bootstrapped() -> None:
    """An answer cut off at the limit ends like any other: its last token sees no value after it."""
    rewards, values = torch.tensor([0.0, 1.0, 0.0]).double(), torch.tensor([0.5, 0.5, 9.0]).double()
    advantages, _ = TOKEN_ADVANTAGES["gae"](rewards, values, torch.tensor([0, 0, 1]), gamma=1.0, lam=0.0)
    assert advantages.tolist() == [0.0, 0.5, -9.0]


def test_long_samples_keep_their_precision() -> None:
    length = 4096
    rewards, values, samples = packed([length])
    ours = TOKEN_ADVANTAGES["gae"](rewards, values, samples, gamma=1.0, lam=0.95)[0]
    assert ours.tolist() == pytest.approx(gae(rewards.tolist(), values.tolist(), 1.0, 0.95), rel=1e-10, abs=1e-10)


def test_places_apart_discount_more() -> None:
    sums = discounted_sums(torch.ones(3).double(), torch.tensor([0, 0, 0]), 0.5, torch.tensor([0, 1, 4]))
    assert sums.tolist() == [1 + 0.5 + 0.5**4, 1 + 0.5**3, 1]


def test_token_rewards_stand_at_the_end_less_the_kl() -> None:
    scores, samples = torch.tensor([2.0, -1.0]).double(), torch.tensor([0, 0, 0, 1])
    assert token_rewards(scores, samples).tolist() == [0, 0, 2, -1]
    kl = torch.tensor([1.0, 0.0, -2.0, 3.0]).double()
    assert token_rewards(scores, samples, kl, 0.5).tolist() == [-0.5, 0.0, 3.0, -2.5]


# Whitening ---------------------------------------------------------------------------------------------------------


@given(parts=st.lists(st.lists(st.floats(-9, 9), max_size=6), min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_moments_do_not_depend_on_the_parts(parts: list[list[float]]) -> None:
    values = [v for part in parts for v in part]
    ours = merged(Moments.of(torch.tensor(part, dtype=torch.float64)) for part in parts)
    assert ours.count == len(values)
    if values:
        assert ours.mean == pytest.approx(np.mean(values), abs=1e-12)
        assert ours.m2 == pytest.approx(np.var(values) * len(values), abs=1e-9)
        expected = np.std(values, ddof=1) if len(values) > 1 else 0.0
        assert ours.std == pytest.approx(expected, abs=1e-7)


def test_moments_take_what_the_mask_holds() -> None:
    values, mask = torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True])
    assert Moments.of(values, mask) == Moments(2.0, 2.0, 2.0)
    assert Moments.of(values, torch.zeros(3, dtype=torch.bool)) == Moments(), "all masked"


def test_a_far_mean_costs_no_precision() -> None:
    """Where the mean is 1e8 standard deviations away, a sum of squares in float64 holds nothing of the variance."""
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    far = values + 1e8
    ours = merged(Moments.of(part) for part in far.split(100))
    assert ours.variance == pytest.approx(float(far.var()), rel=1e-9)
    naive = (float(far.square().sum()) - float(far.sum()) ** 2 / 1000) / 999
    assert naive != pytest.approx(float(far.var()), rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitened_values_have_mean_0_and_deviation_1(dtype: torch.dtype) -> None:
    values = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3 + 5).to(dtype)
    white = whiten(values, Moments.of(values))
    assert white.dtype == dtype
    assert float(white.double().mean()) == pytest.approx(0, abs=1e-6)
    assert float(white.double().std()) == pytest.approx(1, abs=1e-5)
    for degenerate in (torch.full((4,), 0.1, dtype=dtype), torch.tensor([7.0], dtype=dtype)):
        assert not whiten(degenerate, Moments.of(degenerate)).any(), "equal values, one value"
    assert whiten(values[:0], Moments()).numel() == 0


def test_running_moments_come_back_exactly() -> None:
    state = merged(Moments.of(torch.randn(5).double()) for _ in range(7))
    restored = Moments(*map(float, (repr(state.count), repr(state.mean), repr(state.m2))))
    assert restored == state
    more = Moments.of(torch.ones(3).double())
    assert restored.merge(more) == state.merge(more)


# The critic --------------------------------------------------------------------------------------------------------


def test_value_loss_equals_the_loop_and_its_gradient_the_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    loss, quantities = value_loss(values, old, returns, value_clip=0.2)
    for i, (v, o, r) in enumerate(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)):
        clipped = o + min(max(v - o, -0.2), 0.2)
        assert float(loss[i].detach()) == pytest.approx(0.5 * max((v - r) ** 2, (clipped - r) ** 2))
        assert float(quantities["critic/clipfrac"][i]) == float((clipped - r) ** 2 > (v - r) ** 2)
    assert 0 < float(quantities["critic/clipfrac"].mean()) < 1
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, value_clip=0.2)[0], values)


def test_value_loss_without_a_clip_is_half_the_squared_error() -> None:
    values, returns = torch.tensor([3.0]), torch.tensor([1.0])
    loss, quantities = value_loss(values, torch.tensor([0.0]), returns, value_clip=None)
    assert loss.tolist() == [2.0] and quantities["critic/clipfrac"].tolist() == [0.0]


def test_explained_variance() -> None:
    returns = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    known = Moments.of(returns)
    assert explained_variance(Moments.of(returns - returns), known) == 1
    assert explained_variance(Moments.of(returns - returns.mean()), known) == pytest.approx(0)
    assert explained_variance(Moments.of(returns + returns), known) == pytest.approx(-3), "worse than a constant"
    noisy = returns + 0.5 * torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = 1 - float(np.var((returns - noisy).numpy()) / np.var(returns.numpy()))
    assert explained_variance(Moments.of(returns - noisy), known) == pytest.approx(expected)
    assert explained_variance(Moments.of(returns), Moments.of(torch.ones(5))) == 0, "returns that do not vary"
