"""Ours against the numbers of TRL 1.16.0, recorded by `trl_losses.py`, which says how."""

import pytest
import torch

from spmd_rl.algo import AGGREGATIONS, POLICY_LOSSES, POLICY_TERMS
from spmd_rl.algo.inputs import Tokens
from tests.unit.algo.trl_losses import ADVANTAGES, ENTROPY, MAX_LENGTH, NEW, OLD, SETTINGS

RECORDED = {
    "grpo": (0.297858513770, [
        -0.073678061205, -0.054582050205, 0.0, -0.066666666667, 0.273501194568,
        0.0, 0.0, 0.07327650092, 0.04911870747,
    ]),
    "bnpo": (0.064382522888, [
        -0.09823741494, -0.07277606694, 0.0, -0.088888888889, 0.182334129712,
        0.0, 0.0, 0.07327650092, 0.04911870747,
    ]),
    "dapo": (0.064382522888, [
        -0.09823741494, -0.07277606694, 0.0, -0.088888888889, 0.182334129712,
        0.0, 0.0, 0.07327650092, 0.04911870747,
    ]),
    "dr_grpo": (0.012071723042, [
        -0.018419515301, -0.013645512551, 0.0, -0.016666666667, 0.034187649321,
        0.0, 0.0, 0.013739343923, 0.009209757651,
    ]),
    "two-sided": (0.269969707171, [
        -0.073678061205, -0.054582050205, 0.0, -0.066666666667, 0.0,
        0.0, 0.0, 0.0, 0.04911870747,
    ]),
    "gspo": (0.244822191081, [
        0.0, 0.0, 0.0, 0.0, 0.192733034336,
        0.192733034336, 0.04911870747, 0.04911870747, 0.04911870747,
    ]),
    "luspo": (0.061000504573, [
        0.0, 0.0, 0.0, 0.0, 0.385466068671,
        0.385466068671, 0.14735612241, 0.14735612241, 0.14735612241,
    ]),
    "cispo": (-0.082724139979, [
        -0.09823741494, -0.07277606694, -0.115555555556, -0.088888888889, 0.158888888889,
        0.090544449194, 0.032925254253, 0.057777777778, 0.04911870747,
    ]),
    "sapo": (0.434156163110, [
        -0.073474699381, -0.054136122678, -0.103057772882, -0.066666666667, 0.256047398055,
        0.133332723259, 0.032323084426, 0.065393415398, 0.048969264746,
    ]),
    "entropy": (0.052160300666, [
        -0.09823741494, -0.07277606694, 0.0, -0.088888888889, 0.182334129712,
        0.0, 0.0, 0.07327650092, 0.04911870747,
    ]),
}  # fmt: skip
PPO = {"clip_low": 0.2, "clip_high": 0.28}
GSPO = {"clip_low": 0.05, "clip_high": 0.08}
FLOAT32 = float(torch.tensor(1.05, dtype=torch.float32))
"""TRL rounds its temperatures so, whatever the type of the rest."""
OURS: dict[str, tuple[str, dict[str, float], str]] = {
    "grpo": ("ppo_clip", PPO, "seq-mean-token-mean"),
    "bnpo": ("ppo_clip", PPO, "token-mean"),
    "dapo": ("ppo_clip", PPO, "token-mean"),
    "dr_grpo": ("ppo_clip", PPO, "seq-mean-token-sum-norm"),
    "two-sided": ("dual_clip", PPO | {"dual_clip": 1.4}, "seq-mean-token-mean"),
    "gspo": ("gspo", GSPO, "seq-mean-token-mean"),
    "luspo": ("gspo", GSPO, "seq-mean-token-sum"),
    "cispo": ("cispo", {"clip_low": 1.0, "clip_high": 0.3}, "token-mean"),  # TRL's epsilon_high is the bound itself
    "sapo": ("sapo", {"sapo_tau_pos": 1.0, "sapo_tau_neg": FLOAT32}, "seq-mean-token-mean"),
    "entropy": ("ppo_clip", PPO, "token-mean"),
}
"""Under TRL's name: our loss, its keys and the aggregation."""


def joined(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def batch() -> tuple[Tokens, torch.Tensor]:
    lengths = torch.tensor([len(row) for row in NEW])
    samples = torch.arange(len(NEW)).repeat_interleave(lengths)
    data = Tokens(
        logprobs=joined(NEW).requires_grad_(),
        old_logprobs=joined(OLD),
        rollout_logprobs=joined(OLD),
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64)[samples],
        entropy=joined(ENTROPY),
        samples=samples,
        segments=samples,
    )
    return data, lengths


@pytest.mark.parametrize("name", list(SETTINGS))
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    loss_name, keys, aggregation = OURS[name]
    data, lengths = batch()
    norm = {"loss_agg_length": MAX_LENGTH} if aggregation == "seq-mean-token-sum-norm" else {}
    weights = AGGREGATIONS[aggregation](lengths, **norm)[data.samples]
    loss, _ = POLICY_LOSSES[loss_name](data, **keys)
    if name == "entropy":
        loss = loss + POLICY_TERMS["entropy"](data, entropy_coef=SETTINGS[name]["entropy_coef"])[0]
    total = (weights * loss).sum()
    (gradient,) = torch.autograd.grad(total, data.logprobs)
    recorded, recorded_gradient = RECORDED[name]
    assert total.item() == pytest.approx(recorded, abs=2e-12)
    assert gradient.tolist() == pytest.approx(recorded_gradient, abs=2e-12)
