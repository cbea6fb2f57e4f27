"""Sampling steps, densities and losses of diffusion models against their definitions."""

import math

import pytest
import torch

from spmd_rl.algo.diffusion import (
    NOISES,
    Gauss,
    constant_noise,
    flow_grpo,
    flow_noise,
    goodness,
    log_density,
    nft,
    sde_step,
    shifted,
    step_kl,
    trained_steps,
)

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("name", NOISES)
def test_the_density_of_a_step_integrates_to_one_with_the_mean_and_variance_of_the_sde(name: str) -> None:
    """One element, by the trapezoid rule over +-12 deviations."""
    level, after = 0.6, 0.5
    g = NOISES[name](level, 0.9, 0.7)
    step = sde_step(torch.tensor([[0.3]]).double(), torch.tensor([[-1.2]]).double(), level, after, g)
    x = torch.linspace(float(step.mean) - 12 * step.std, float(step.mean) + 12 * step.std, 20001, dtype=torch.float64)
    density = log_density(x[:, None], step).exp()
    moments = [torch.trapezoid(density * (x - float(step.mean)) ** n, x) for n in range(3)]
    assert [float(m) for m in moments] == pytest.approx([1, 0, g**2 * (level - after)], abs=1e-9)


def test_the_log_density_is_torchs_over_the_number_of_elements() -> None:
    step, found = Gauss(normal(3, 2, 4, 4), 0.37), normal(3, 2, 4, 4)
    wanted = torch.distributions.Normal(step.mean, step.std).log_prob(found).flatten(1).sum(1) / 32
    torch.testing.assert_close(log_density(found, step), wanted)


def test_without_noise_a_step_is_eulers() -> None:
    x, v = normal(2, 5), normal(2, 5)
    step = sde_step(x, v, 0.5, 0.25, 0.0)
    torch.testing.assert_close(step.mean, x - 0.25 * v)
    assert step.std == 0


@pytest.mark.parametrize("g", [0.3, 0.9])
def test_many_steps_of_the_sde_keep_the_marginals_of_the_flow(g: float) -> None:
    """For data N(m, c^2) the velocity is known, and so is the variance at each level: (1 - s)^2 c^2 + s^2."""
    m, c, n = 0.8, 0.5, 400
    generator = torch.Generator().manual_seed(1)
    x, levels = torch.randn(40_000, 1, generator=generator), [1 - 0.8 * i / n for i in range(n + 1)]
    for level, after in zip(levels, levels[1:], strict=False):
        variance = (1 - level) ** 2 * c**2 + level**2
        noise = level / variance * (x - (1 - level) * m)
        data = m + (1 - level) * c**2 / variance * (x - (1 - level) * m)
        step = sde_step(x, noise - data, level, after, g)
        x = step.mean + step.std * torch.randn(x.shape, generator=generator)
    assert float(x.mean()) == pytest.approx(0.8 * m, abs=0.02)
    assert float(x.var()) == pytest.approx(0.8**2 * c**2 + 0.2**2, rel=0.04)


def test_a_step_of_dance_grpo_as_the_authors_write_it() -> None:
    x, v, level, after, eta = normal(2, 3), normal(2, 3), 0.7, 0.6, 0.3
    ds, x0 = after - level, x - level * v
    score = -(x - x0 * (1 - level)) / level**2
    step = sde_step(x, v, level, after, constant_noise(level, 0.9, eta))
    torch.testing.assert_close(step.mean, x + ds * v + -0.5 * eta**2 * score * ds)
    assert step.std == pytest.approx(eta * math.sqrt(level - after))


def test_a_step_of_flow_grpo_as_the_authors_write_it() -> None:
    x, v, level, after = normal(2, 3), normal(2, 3), 0.7, 0.6
    std, dt = 0.7 * math.sqrt(level / (1 - level)), after - level
    mean = x * (1 + std**2 / (2 * level) * dt) + v * (1 + std**2 * (1 - level) / (2 * level)) * dt
    step = sde_step(x, v, level, after, flow_noise(level, 0.9, 0.7))
    torch.testing.assert_close(step.mean, mean)
    assert step.std == pytest.approx(std * math.sqrt(-dt))
    assert flow_noise(1.0, 0.9, 0.7) == flow_noise(0.9, 0.9, 0.7)


def test_the_kl_of_steps_is_torchs_over_the_number_of_elements() -> None:
    one, other = Gauss(normal(3, 8), 0.4), Gauss(normal(3, 8), 0.4)
    normals = [torch.distributions.Normal(step.mean, step.std) for step in (one, other)]
    torch.testing.assert_close(step_kl(one, other), torch.distributions.kl_divergence(*normals).mean(1))


def test_the_gradient_of_flow_grpo_at_the_old_policy_is_the_advantage_times_the_score() -> None:
    logprobs, advantages = normal(4).requires_grad_(), normal(4)
    losses, metrics = flow_grpo(logprobs, logprobs.detach(), advantages, clip=1e-4)
    losses.sum().backward()
    assert metrics["actor/ratio"].tolist() == [1.0] * 4 and not metrics["actor/clipfrac"].any()
    torch.testing.assert_close(logprobs.grad, -advantages)


def test_a_ratio_beyond_the_clip_has_no_gradient() -> None:
    logprobs = torch.tensor([0.01, -0.01, 0.01, -0.01]).requires_grad_()
    losses, metrics = flow_grpo(logprobs, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), clip=1e-3)
    losses.sum().backward()
    assert [bool(x) for x in logprobs.grad] == [False, True, True, False]
    assert metrics["actor/clipfrac"].tolist() == [1, 0, 0, 1]


def test_nft_moves_from_the_old_policy_by_goodness_and_is_flow_matching_for_perfect_pictures() -> None:
    old, target, r = normal(3, 6), normal(3, 6), torch.tensor([0.0, 0.5, 1.0]).double()
    velocity = old.clone().requires_grad_()
    nft(velocity, old, target, r, beta=0.7).sum().backward()
    torch.testing.assert_close(velocity.grad, 2 * 0.7 * (2 * r - 1)[:, None] * (old - target) / 6)
    other = normal(3, 6)
    perfect = nft(other, old, target, torch.ones(3), beta=1.0)
    torch.testing.assert_close(perfect, (other - target).square().mean(1))
    assert goodness(torch.tensor([-9.0, 0.0, 1.0, 9.0]), 2.0).tolist() == [0, 0.5, 0.75, 1]


def test_the_window_moves_over_all_steps_but_the_last() -> None:
    assert trained_steps(10, None, 5) == range(9)
    assert [list(trained_steps(6, 2, moves)) for moves in range(4)] == [[0, 1], [2, 3], [4], [1, 2]]
    assert {i for moves in range(5) for i in trained_steps(6, 2, moves)} == set(range(5))


def test_shifted_levels() -> None:
    assert shifted(4, 1.0) == [1, 0.75, 0.5, 0.25, 0]
    levels = shifted(10, 3.0)
    assert levels[0] == 1 and levels[-1] == 0 and levels[5] == pytest.approx(0.75)
