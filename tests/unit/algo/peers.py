"""Thirty inputs a loss, and what ours make of them: `test_peers.py` holds it to the frozen values of other libraries.

`freeze_peers.py` writes their values, by their own functions; `python -m bench.second_opinion` runs TRL's anew.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.algo import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, POLICY_TERMS
from spmd_rl.algo.advantages.tokens import gae
from spmd_rl.algo.inputs import Scored, Tokens
from spmd_rl.algo.values import value_loss

NUM_INPUTS, WIDTH = 30, 16
"""Inputs a function; the constant of `seq-mean-token-sum-norm`."""
Found = tuple[Tensor, Tensor]
"""A value and its gradient, both of any shape."""


@dataclass(frozen=True)
class Input:
    """Answers of a batch as padded rows, 0 beyond their ends; all floats are float64."""

    new: Tensor
    """[B, T] logprobs"""
    old: Tensor
    """[B, T]"""
    advantages: Tensor
    """[B, T], the same at all tokens of an answer"""
    values: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T] of 0 and 1"""
    scores: Tensor
    """[B]: 0, 1 or a number between"""
    groups: Tensor
    """int64 [B]: four answers each"""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each answer: int64 [B]."""
        return self.mask.sum(1).long()

    def rows(self, values: Sequence[float]) -> Tensor:
        """One value an answer, at each of its tokens."""
        return torch.as_tensor(values, dtype=torch.float64)[:, None] * self.mask

    def joined(self, rows: Tensor) -> Tensor:
        """The tokens of all answers, without padding: [N]."""
        return rows[self.mask.bool()]


def made(number: int) -> Input:
    """Return the input of this number: from near the old policy to far from it."""
    draw = random.Random(number)
    size, longest, drift = 8, 2 + number % 7, (0.05, 0.4, 1.5)[number % 3]
    lengths = [draw.randint(1, longest) for _ in range(size)]
    width = max(lengths)
    mask = torch.tensor([[float(t < n) for t in range(width)] for n in lengths], dtype=torch.float64)

    def noise(scale: float) -> Tensor:
        return torch.tensor([[draw.gauss(0, scale) for _ in range(width)] for _ in lengths], dtype=torch.float64) * mask

    old = -0.05 * mask - noise(1.0).abs()
    scores = torch.tensor([draw.choice((0.0, 1.0, 0.25)) for _ in lengths], dtype=torch.float64)
    advantages = torch.tensor([draw.gauss(0, 1) for _ in lengths], dtype=torch.float64)[:, None] * mask
    return Input((old + noise(drift)).clamp(max=0), old, advantages, noise(1.0), mask, scores, torch.arange(size) // 4)


def loss(name: str, aggregation: str, **keys: float) -> Callable[[Input], Found]:
    """Return our loss of that name."""

    def run(given: Input) -> Found:
        samples = torch.arange(len(given.mask))[:, None].expand(given.mask.shape)[given.mask.bool()]
        new, old, advantages = map(given.joined, (given.new.clone().requires_grad_(), given.old, given.advantages))
        norm = {"loss_agg_length": WIDTH} if aggregation.endswith("norm") else {}
        weights = AGGREGATIONS[aggregation](given.lengths, **norm)[samples]
        is_right = (given.scores > 0).double()
        right = is_right[samples] / (is_right @ given.lengths.double()).clamp(min=1) / weights
        leaf = new.detach().requires_grad_()
        tokens = Tokens(leaf, old, old, advantages, torch.zeros_like(old), samples, samples, right=right)
        total = (weights * (POLICY_LOSSES | POLICY_TERMS)[name](tokens, **keys)[0]).sum()
        return total, torch.autograd.grad(total, leaf)[0]

    return run


def advantage(name: str, **keys: float) -> Callable[[Input], Found]:
    """Return our advantage of answers, at each token, with a gradient of 0."""

    def run(given: Input) -> Found:
        found = ADVANTAGES[name](Scored(given.scores, given.groups, given.lengths), **keys)
        return given.joined(given.rows(found.tolist())), torch.zeros(1)

    return run


def kl(name: str) -> Callable[[Input], Found]:
    """Return our estimate of the KL, with its gradient."""

    def run(given: Input) -> Found:
        leaf = given.joined(given.new).requires_grad_()
        found = KL_ESTIMATORS[name](leaf, given.joined(given.old))
        return found, torch.autograd.grad(found.sum(), leaf)[0]

    return run


def critic(given: Input) -> Found:
    """Return our clipped loss of a critic."""
    leaf = given.joined(given.values).requires_grad_()
    total = value_loss(leaf, given.joined(given.old), given.joined(given.advantages), value_clip=0.5)[0].mean()
    return total, torch.autograd.grad(total, leaf)[0]


def generalised(given: Input) -> Found:
    """Return our advantages of tokens, from scores at the last token, and the critic's targets."""
    samples = torch.arange(len(given.mask))[:, None].expand(given.mask.shape)[given.mask.bool()]
    last = torch.zeros_like(given.mask).scatter(1, given.lengths[:, None] - 1, given.scores[:, None])
    return gae(given.joined(last), given.joined(given.values), samples, gamma=0.9, lam=0.95)


PPO = {"clip_low": 0.2, "clip_high": 0.28}
MEAN, SEQUENCE = "token-mean", "seq-mean-token-mean"
FLOAT32 = float(torch.tensor(1.05, dtype=torch.float32))
"""TRL rounds its temperatures so."""
OURS: dict[str, Callable[[Input], Found]] = {
    **{f"verl ppo {agg}": loss("dual_clip", agg, **PPO, dual_clip=3.0) for agg in AGGREGATIONS},
    "verl gspo": loss("gspo_token", SEQUENCE, clip_low=3e-2, clip_high=4e-2),
    "verl gmpo": loss("gmpo", SEQUENCE, clip_low=0.4, clip_high=0.4),
    "verl cispo": loss("cispo", MEAN, clip_low=1.0, clip_high=0.3),
    "verl sapo": loss("sapo", SEQUENCE, sapo_tau_pos=1.0, sapo_tau_neg=1.05),
    "verl dppo_tv": loss("dppo_tv", MEAN, clip_low=0.15, clip_high=0.15, dppo_cap=20.0),
    "verl dppo_kl": loss("dppo_kl", MEAN, clip_low=0.05, clip_high=0.05, dppo_cap=20.0),
    "verl gpg": loss("vanilla_pg", MEAN),
    "verl k1": kl("k1"),
    "verl k2": kl("k2"),
    "verl k3": kl("k3"),
    "verl value loss": critic,
    "verl gae": generalised,
    "verl grpo": advantage("grpo", norm_std=True),
    "verl dr_grpo": advantage("grpo", norm_std=False),
    "verl rloo": advantage("rloo"),
    "verl opo": advantage("opo"),
    "verl reinforce_pp_baseline": advantage("reinforce_pp_baseline"),
    "TRL grpo": loss("ppo_clip", SEQUENCE, **PPO),
    "TRL dapo": loss("ppo_clip", MEAN, **PPO),
    "TRL dr_grpo": loss("ppo_clip", "seq-mean-token-sum-norm", **PPO),
    "TRL two-sided": loss("dual_clip", SEQUENCE, **PPO, dual_clip=1.4),
    "TRL gspo": loss("gspo", SEQUENCE, clip_low=0.05, clip_high=0.08),
    "TRL cispo": loss("cispo", MEAN, clip_low=1.0, clip_high=0.3),
    "TRL sapo": loss("sapo", SEQUENCE, sapo_tau_pos=1.0, sapo_tau_neg=FLOAT32),
    "NeMo positive examples": loss("sft", MEAN, sft_coef=0.1),
}
"""What ours make of an input, under the name of the peer's function."""


def digest(value: Tensor, gradient: Tensor) -> list[float]:
    """Return four numbers that hold all of a value and its gradient: sums under two weights each, to 9 digits."""
    sums = []
    for entries in (value.detach().double().flatten(), gradient.double().flatten()):
        places = torch.arange(1, len(entries) + 1, dtype=torch.float64)
        sums += [float((entries * wave(places)).sum()) for wave in (torch.sin, torch.cos)]
    return [float(f"{number:.9g}") for number in sums]
