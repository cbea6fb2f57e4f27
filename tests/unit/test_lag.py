"""Under a real lag: answers of an old policy train a newer one. What the expected gradient of each correction is.

The policies are tables, so that expectations are sums over all answers: to the bit, with no sampling.
"""

import pytest
import torch
from torch import Tensor

from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.config.sections.algorithm import CorrectionConfig
from spmd_rl.learn.losses import bind_loss
from tests.unit.test_policy_loss import batch_of

V = 4
"""Tokens of the vocabulary."""
WIDE = {"clip_low": 1.0, "clip_high": 1e6}


class Policy:
    """Answers of `length` tokens, 1 or 2; the second token's table depends on the first one."""

    def __init__(self, length: int, seed: int, start: "Policy | None" = None, step: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = V + (length - 1) * V * V
        move = step * torch.randn(size, generator=generator, dtype=torch.float64)
        self.table = (move if start is None else start.table.detach() + move).requires_grad_()
        self.length = length

    def logprobs(self) -> Tensor:
        """[answers, length], all answers in order."""
        first = self.table[:V].log_softmax(0)
        if self.length == 1:
            return first[:, None]
        second = self.table[V:].view(V, V).log_softmax(1)
        return torch.stack([first.repeat_interleave(V), second.flatten()], 1)


def scores(length: int) -> Tensor:
    return torch.randn(V**length, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def on_policy(policy: Policy) -> Tensor:
    """The gradient of minus the expected score."""
    logprobs = policy.logprobs().sum(1)
    (gradient,) = torch.autograd.grad(-(logprobs.exp() * scores(policy.length)).sum(), policy.table)
    return gradient


def expected(policy: Policy, sampled: Policy, proximal: Policy | None = None, **settings) -> Tensor:
    """The expected gradient of a loss for answers of `sampled`; `proximal`: the trainer's before its first update."""
    answers, length = V**policy.length, policy.length
    batch = batch_of(*[length] * answers)
    mask = batch.loss_mask
    old, engine = ((p or policy).logprobs().detach() for p in (proximal, sampled))
    batch.old_logprobs = torch.zeros(len(mask), dtype=torch.float64).masked_scatter(mask, old.flatten())
    batch.rollout_logprobs = torch.zeros(len(mask), dtype=torch.float64).masked_scatter(mask, engine.flatten())
    each = scores(length).repeat_interleave(length)
    batch.advantages = torch.zeros(len(mask), dtype=torch.float64).masked_scatter(mask, each)
    logprobs = policy.logprobs().flatten()
    loss, _ = bind_loss(AlgorithmConfig(**settings))(logprobs, torch.zeros_like(logprobs), batch)
    probability = engine.sum(1).exp().repeat_interleave(length)
    (gradient,) = torch.autograd.grad((probability * loss).sum(), policy.table)
    return gradient


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def lagging(length: int, versions: int) -> tuple[Policy, Policy]:
    """The policy that trains, and the one that sampled so many versions before."""
    sampled = policy = Policy(length, 0)
    for version in range(versions):
        policy = Policy(length, 1 + version, policy, step=0.6)
    return policy, sampled


def correct(level: str, **bounds) -> dict:
    return {"loss": "vanilla_pg", "correction": CorrectionConfig(level=level, **{"upper": None, **bounds})}


EXACT = {
    "token weights": (1, correct("token")),
    "segment weights": (1, correct("segment")),
    "geometric weights": (1, correct("geometric")),
    "sequence weights": (1, correct("sequence")),
    "sequence weights, two tokens": (2, correct("sequence")),
    "decoupled PPO": (1, {"loss": "ppo_clip", "correction": CorrectionConfig(level="token", upper=None)}),
    "decoupled PPO, two tokens": (2, {"loss": "ppo_clip", "correction": CorrectionConfig("sequence", upper=None)}),
    "PPO on the engine's logprobs": (1, {"loss": "ppo_clip", "old_logprobs": "engine", **WIDE}),
    "CISPO": (1, {"loss": "cispo", "old_logprobs": "engine", **WIDE}),
    "DPPO, total variation": (1, {"loss": "dppo_tv", "old_logprobs": "engine", "clip_low": 1, "clip_high": 1.0}),
    "DPPO, KL": (1, {"loss": "dppo_kl", "old_logprobs": "engine", **WIDE}),
}
"""Length of the answers, and settings under which nothing is truncated, clipped or masked."""


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize("name", EXACT)
def test_unbounded_corrections_are_unbiased(name: str, versions: int) -> None:
    length, settings = EXACT[name]
    policy, sampled = lagging(length, versions)
    assert error(expected(policy, sampled, **settings), on_policy(policy)) < 1e-6


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize(
    ("length", "settings"),
    [
        *((length, {"loss": loss}) for length in (1, 2) for loss in ("vanilla_pg", "ppo_clip", "cispo", "topr", "tis")),
        *((2, correct(level)) for level in ("token", "segment", "geometric")),
        (2, {"loss": "cispo", "old_logprobs": "engine", **WIDE}),
    ],
)
def test_what_ignores_the_lag_or_a_part_of_it_is_biased(length: int, settings: dict, versions: int) -> None:
    """Without a correction the trainer's own old logprobs make every ratio 1; weights of tokens are no sequences'."""
    policy, sampled = lagging(length, versions)
    assert error(expected(policy, sampled, **settings), on_policy(policy)) > 0.03


def test_without_lag_all_are_the_policy_gradient() -> None:
    policy, _ = lagging(2, 1)
    for settings in ({"loss": "ppo_clip"}, {"loss": "topr", "old_logprobs": "engine"}, correct("token")):
        assert error(expected(policy, policy, **settings), on_policy(policy)) < 1e-6


def pieces(policy: Policy, sampled: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """Of each answer: its probability when it was sampled, its ratio now, and the gradient of its loss."""
    logprobs, before = policy.logprobs().sum(1), sampled.logprobs().detach().sum(1)
    gradients = [torch.autograd.grad(-one, policy.table, retain_graph=True)[0] for one in logprobs]
    return before.exp(), (logprobs.detach() - before).exp(), torch.stack(gradients) * scores(policy.length)[:, None]


@pytest.mark.parametrize("bounds", [{"upper": 1.2}, {"mask_low": 0.5, "mask_high": 2.0}])
def test_a_bounded_weight_is_biased_by_what_it_cuts_off(bounds: dict) -> None:
    """And so by no more than the mean of what it cuts off, times the largest gradient of an answer."""
    policy, sampled = lagging(2, 2)
    probability, ratio, gradients = pieces(policy, sampled)
    if "upper" in bounds:
        weight = ratio.clamp(max=bounds["upper"])
    else:
        weight = ratio * (ratio >= bounds["mask_low"]) * (ratio <= bounds["mask_high"])
    found, wanted = expected(policy, sampled, **correct("sequence", **bounds)), on_policy(policy)
    assert error(found, (probability * weight) @ gradients) < 1e-6
    bias, most = (found - wanted).norm(), gradients.norm(dim=1).max()
    assert 0.01 * wanted.norm() < bias <= (probability * (ratio - weight).abs()).sum() * most


def test_truncation_at_one_and_topr_follow_their_papers_on_the_engines_logprobs() -> None:
    policy, sampled = lagging(2, 2)
    probability, ratio, gradients = pieces(policy, sampled)
    topr = torch.where(scores(2) < 0, ratio.clamp(max=1), 1.0)
    found = expected(policy, sampled, loss="topr", old_logprobs="engine")
    assert error(found, (probability * topr) @ gradients) < 1e-6
    policy, sampled = lagging(1, 2)
    probability, ratio, gradients = pieces(policy, sampled)
    found = expected(policy, sampled, loss="tis", old_logprobs="engine")
    assert error(found, (probability * ratio.clamp(max=1)) @ gradients) < 1e-6


def test_decoupled_ppo_clips_around_the_proximal_policy() -> None:
    """The behaviour policy only weights; the plain ratio to it would be clipped although training has not begun."""
    proximal, sampled = lagging(1, 2)
    decoupled = {"loss": "ppo_clip", "correction": CorrectionConfig(level="token", upper=None)}
    assert error(expected(proximal, sampled, proximal, **decoupled), on_policy(proximal)) < 1e-6
    clipped = expected(proximal, sampled, loss="ppo_clip", old_logprobs="engine")
    assert error(clipped, on_policy(proximal)) > 0.03
    later = Policy(1, 7, proximal, step=2.0)
    probability, ratio, gradients = pieces(later, sampled)
    moved = (later.logprobs() - proximal.logprobs()).detach().exp()[:, 0]
    inside = torch.where(scores(1) > 0, moved <= 1.2, moved >= 0.8)
    assert 0 < inside.sum() < V
    found = expected(later, sampled, proximal, **decoupled)
    assert error(found, (probability * ratio * inside) @ gradients) < 1e-6
