"""Every policy loss and term against a float64 loop from its paper: values, gradients, and inputs at the edge."""

import inspect
import math
from dataclasses import replace

import pytest
import torch

from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.policy import POLICY_LOSSES, POLICY_TERMS
from tests.unit.algo.cases import KEYS, Sample, samples, tokens
from tests.unit.algo.references import REFERENCES

ALL = POLICY_LOSSES | POLICY_TERMS
LENGTHS = (5, 1, 9, 3, 12)
REPORTED = {"actor/ratio", "actor/approxkl", "actor/clipfrac"}


def expected(name: str, rows: list[Sample]) -> list[float]:
    return [value for row in rows for value in REFERENCES[name](row, row.new, row.new, **KEYS[name])]


def test_references_and_keys_cover_every_loss() -> None:
    assert set(ALL) == set(REFERENCES) == set(KEYS)
    for name, loss in ALL.items():
        assert list(inspect.signature(loss).parameters)[1:] == list(KEYS[name])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", list(ALL))
def test_values(name: str, per_token: bool) -> None:
    for seed in range(5):
        rows = samples(seed, LENGTHS, per_token=per_token)
        loss, quantities = ALL[name](tokens(rows), **KEYS[name])
        assert loss.dtype == torch.float64
        assert loss.tolist() == pytest.approx(expected(name, rows), rel=1e-12, abs=1e-14)
        assert all(q.shape == loss.shape and q.dtype == loss.dtype and not q.requires_grad for q in quantities.values())
    single, _ = ALL[name](tokens(rows, torch.float32), **KEYS[name])
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(expected(name, rows), rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", [name for name in ALL if name != "entropy"])
def test_gradients_by_finite_differences(name: str, per_token: bool) -> None:
    """Central differences of the *reference*, holding what stands inside a stop-gradient."""
    rows = samples(7, LENGTHS, per_token=per_token)
    data = tokens(rows)
    weights = torch.rand(data.logprobs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    loss, _ = ALL[name](data, **KEYS[name])
    (gradient,) = torch.autograd.grad((weights * loss).sum(), data.logprobs)

    numerical, start, step = [], 0, 1e-5
    for row in rows:
        own = weights[start : start + len(row.new)].tolist()
        start += len(row.new)
        for t in range(len(row.new)):
            ends = []
            for sign in (1, -1):
                moved = list(row.new)
                moved[t] += sign * step
                values = REFERENCES[name](row, moved, row.new, **KEYS[name])
                ends.append(math.fsum(w * v for w, v in zip(own, values, strict=True)))
            numerical.append((ends[0] - ends[1]) / (2 * step))
    assert gradient.tolist() == pytest.approx(numerical, rel=1e-6, abs=1e-8)
    assert gradient.abs().max() > 1e-3


def test_the_entropy_bonus_differentiates_the_entropy() -> None:
    data = tokens(samples(0, LENGTHS))
    loss, _ = POLICY_TERMS["entropy"](data, entropy_coef=0.5)
    (gradient,) = torch.autograd.grad(loss.sum(), data.entropy)
    assert gradient.tolist() == pytest.approx([-0.5] * sum(LENGTHS))


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_on_the_old_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    """At ratio 1 every loss is the same ascent direction, but for tokens that it leaves out on purpose."""
    rows = samples(3, LENGTHS)
    for row in rows:
        row.old = list(row.new)
    data = tokens(rows)
    left_out = {"clip_cov": data.marked, "raft_pp": data.advantages < 0}.get(name, torch.zeros_like(data.marked))
    loss, quantities = POLICY_LOSSES[name](data, **KEYS[name])
    _, index, counts = torch.unique_consecutive(data.samples, return_inverse=True, return_counts=True)
    (gradient,) = torch.autograd.grad((loss / counts[index]).sum(), data.logprobs)
    assert gradient.tolist() == pytest.approx((-data.advantages / counts[index]).masked_fill(left_out, 0).tolist())
    assert quantities["actor/ratio"].tolist() == pytest.approx([1] * sum(LENGTHS))
    assert quantities["actor/approxkl"].abs().max() == 0


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_ratios_stay_finite(name: str, dtype: torch.dtype) -> None:
    rows = samples(1, (4, 6))
    for row, shift in zip(rows, (60.0, -60.0), strict=True):
        row.new = [value + shift for value in row.old]
    rows[1].new[0] = rows[1].old[0] + 90
    for sign in (1, -1):
        for row in rows:
            row.advantages = [sign] * len(row.advantages)
        data = tokens(rows, dtype)
        loss, quantities = ALL[name](data, **KEYS[name])
        loss.sum().backward()
        if name != "gmpo":  # its reference multiplies unclamped ratios
            assert loss.tolist() == pytest.approx(expected(name, rows), rel=1e-4)
        leaf = data.entropy if name == "entropy" else data.logprobs
        assert all(torch.isfinite(q).all() for q in (loss, leaf.grad, *quantities.values()))


@pytest.mark.parametrize("name", list(ALL))
def test_edges(name: str) -> None:
    """One token, no token, zero and equal advantages, all weights 0."""
    loss = ALL[name]
    rows = samples(2, (1,))
    assert loss(tokens(rows), **KEYS[name])[0].tolist() == pytest.approx(expected(name, rows))
    assert loss(tokens([]), **KEYS[name])[0].shape == (0,)

    for value in (0.0, 1.5, -1.5):
        rows = samples(2, LENGTHS)
        for row in rows:
            row.advantages = [value] * len(row.advantages)
        result, _ = loss(tokens(rows), **KEYS[name])
        assert result.tolist() == pytest.approx(expected(name, rows), rel=1e-12, abs=1e-14)
        if value == 0 and name not in (
            "kimi",
            "kl_cov",
            "entropy",
            "sft",
        ):  # sft is of right answers, whatever their advantage
            assert result.abs().max() == 0

    data = tokens(samples(2, LENGTHS))
    (loss(data, **KEYS[name])[0] * 0).sum().backward()
    leaf = data.entropy if name == "entropy" else data.logprobs
    assert leaf.grad is not None and leaf.grad.abs().max() == 0


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_what_a_loss_reports(name: str) -> None:
    data = tokens(samples(5, LENGTHS * 3))
    _, quantities = POLICY_LOSSES[name](data, **KEYS[name])
    assert set(quantities) == REPORTED
    log_ratio = (data.logprobs - data.old_logprobs).detach()
    assert quantities["actor/approxkl"].tolist() == pytest.approx((log_ratio.exp() - 1 - log_ratio).tolist())
    assert set(quantities["actor/clipfrac"].tolist()) <= {0.0, 1.0}
    if name not in ("vanilla_pg", "sapo", "kimi"):
        assert 0 < quantities["actor/clipfrac"].mean() < 1, "the case should meet a bound at some tokens only"


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "segment_clip", "gspo", "gspo_token", "raft_pp", "clip_cov"])
def test_clipfrac_is_where_the_gradient_is_gone(name: str) -> None:
    rows = samples(6, LENGTHS)
    for row in rows:
        row.advantages = [abs(a) if name == "raft_pp" else a for a in row.advantages]
    data = tokens(rows)
    loss, quantities = POLICY_LOSSES[name](data, **KEYS[name])
    (gradient,) = torch.autograd.grad(loss.sum(), data.logprobs)
    assert ((gradient == 0) == (quantities["actor/clipfrac"] == 1)).all()


def test_gspo_and_its_token_form_agree_on_one_advantage_per_sample() -> None:
    rows = samples(4, LENGTHS)
    gradients = []
    for name in ("gspo", "gspo_token"):
        data = tokens(rows)
        loss, _ = POLICY_LOSSES[name](data, **KEYS[name])
        gradients.append(torch.autograd.grad(loss.sum(), data.logprobs)[0])
    assert gradients[0].tolist() == pytest.approx(gradients[1].tolist(), rel=1e-12)


def test_segments_of_whole_samples_are_gspo() -> None:
    data = tokens(samples(4, LENGTHS))
    whole = replace(data, segments=data.samples)
    ours, _ = POLICY_LOSSES["segment_clip"](whole, **KEYS["gspo"])
    theirs, _ = POLICY_LOSSES["gspo"](data, **KEYS["gspo"])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", list(ALL))
def test_numbers_of_samples_may_start_anywhere(name: str) -> None:
    """A micro-batch may keep the numbers of a larger batch."""
    data = tokens(samples(4, LENGTHS))
    moved: Tokens = replace(data, samples=data.samples * 3 + 100, segments=data.segments * 2 + 1000)
    assert torch.equal(ALL[name](data, **KEYS[name])[0], ALL[name](moved, **KEYS[name])[0])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_marks_are_required(name: str) -> None:
    with pytest.raises(AssertionError, match="marked"):
        POLICY_LOSSES[name](replace(tokens(samples(0, (3,))), marked=None), **KEYS[name])
