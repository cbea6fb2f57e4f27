"""Sampling: the right distribution, the right logprobs, nothing impossible."""

import pytest
import torch

from spmd_rl.engine.native.sampling import CHUNK, sample, uniform


def draw(logits, temperatures, uniforms):
    rows = len(uniforms)
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64)
    return sample(logits.expand(rows, -1), torch.as_tensor(temperatures).expand(rows), uniforms)


@pytest.mark.parametrize("vocab", [7, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_chi_square(vocab, temperature):
    logits = 1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    num = 60_000
    tokens, _ = draw(logits, temperature, [uniform(17, i) for i in range(num)])
    expected = num * (logits.double() / temperature).softmax(-1)
    common = expected >= 5
    observed = torch.bincount(tokens, minlength=vocab).double()
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None].clamp(min=1e-9)])
    statistic = ((observed - expected) ** 2 / expected)[expected >= 5].sum().item()
    degrees = int((expected >= 5).sum()) - 1
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5  # five standard deviations of chi-square


def test_inverse_cdf_agrees_with_a_plain_one():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(2000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, _ = draw(logits, 1.0, uniforms)
    sums = logits.double().softmax(-1).cumsum(-1)
    plain = torch.searchsorted(sums, uniforms, right=True)
    assert (tokens == plain).float().mean() > 0.998  # float32 masses: a uniform on a border may fall either way
    assert ((tokens - plain).abs() <= 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_log_softmax_in_float32(dtype):
    logits = (10 * torch.randn(6, 500, generator=torch.Generator().manual_seed(0))).to(dtype)
    temperatures = torch.tensor([0.0, 0.3, 1.0, 1.7, 0.0, 1e-3])
    tokens, logprobs = sample(logits, temperatures, torch.linspace(0, 0.99, 6, dtype=torch.float64))
    scale = torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    expected = (logits.float() / scale).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert tokens[[0, 4]].tolist() == logits[[0, 4]].argmax(-1).tolist()


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("vocab", [5, CHUNK, 1000])
def test_the_ends_of_the_interval_draw_something_possible(edge, vocab):
    logits = torch.full((vocab,), -float("inf"))
    logits[[2, vocab // 2]] = torch.tensor([1.0, 0.0])
    tokens, logprobs = draw(logits, 1.0, [edge])
    assert tokens.item() == (2 if edge == 0.0 else vocab // 2)
    assert torch.isfinite(logprobs).all()


def test_huge_and_tiny_logits():
    for shift in (-1e30, 0.0, 1e30):
        tokens, logprobs = draw(torch.full((300,), shift), 1.0, [0.5])
        assert 140 < tokens.item() < 160
        assert abs(logprobs.item() + torch.tensor(300.0).log().item()) < 1e-5
    logits = torch.tensor([0.0, 1e4])
    assert draw(logits, 1.0, [0.0])[0].item() == 1


def test_rows_do_not_see_each_other():
    logits = torch.randn(9, 777, generator=torch.Generator().manual_seed(3))
    temperatures, uniforms = torch.linspace(0, 2, 9), torch.linspace(0, 0.999, 9, dtype=torch.float64)
    tokens, logprobs = sample(logits, temperatures, uniforms)
    for row in range(9):
        one = slice(row, row + 1)
        token, logprob = sample(logits[one], temperatures[one], uniforms[one])
        assert (token.item(), logprob.item()) == (tokens[row].item(), logprobs[row].item())


def test_uniforms_are_uniform_and_counted():
    values = torch.tensor([uniform(seed, t) for seed in (0, 1, 2**64 - 1) for t in range(2000)], dtype=torch.float64)
    assert values.min() >= 0.0 and values.max() < 1.0 and len(values.unique()) == 6000
    assert abs(values.mean() - 0.5) < 0.02 and abs(values.var() - 1 / 12) < 0.01
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)


def test_golden_values():
    """Other engines and later versions must draw the same noise."""
    assert (uniform(0, 0), uniform(12345, 678)) == (0.0564663990004608, 0.09385792785792979)
