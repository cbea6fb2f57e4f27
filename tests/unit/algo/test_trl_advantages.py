"""Ours against the numbers of TRL 1.16.0, recorded by `trl_advantages.py`, which says how."""

import math

import pytest
import torch

from spmd_rl.algo.advantages import ADVANTAGES, group
from spmd_rl.algo.inputs import Scored
from spmd_rl.algo.shaping import overlong_penalty, repetition_penalty
from tests.unit.algo.trl_advantages import ANSWERS, LENGTHS, REWARDS

TRL_EPSILON = 1e-4
"""What TRL adds to a standard deviation; ours is 1e-6."""
GRPO_GROUP = [0.9998000399920016, -0.9998000399920016, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
GRPO_GROUP += [0.8658754168603869, 0.8658754168603869, -0.8658754168603869, -0.8658754168603869]
GRPO_GROUP += [-1.0245990703227268, 1.3173416618435059, -0.4391138872811686, 0.14637129576038954]
GRPO_NONE = [0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5, -0.5, -0.5, -1.09375, 1.40625, -0.46875, 0.15625]
GRPO_BATCH = [0.8220912758212732, -0.8220912758212732, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
GRPO_BATCH += [0.8220912758212732, 0.8220912758212732, -0.8220912758212732, -0.8220912758212732]
GRPO_BATCH += [-1.798324665859035, 2.312131713247331, -0.7707105710824436, 0.2569035236941479]
RLOO = [0.75, -0.75, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
RLOO += [0.6666666666666667, 0.6666666666666667, -0.6666666666666666, -0.6666666666666666]
RLOO += [-1.4583333333333335, 1.875, -0.625, 0.20833333333333337]


@pytest.mark.parametrize(
    ("name", "keys", "theirs"),
    [
        ("grpo", {"norm_std": True}, GRPO_GROUP),
        ("dr_grpo", {}, GRPO_NONE),
        ("lite_ppo", {}, GRPO_BATCH),
        ("rloo", {}, RLOO),
    ],
)
def test_advantages(name: str, keys: dict, theirs: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "EPSILON", TRL_EPSILON)
    flat = [(score, number) for number, scores in enumerate(REWARDS) for score in scores]
    chosen = [i for i, (score, _) in enumerate(flat) if not math.isnan(score)]
    scores, groups = zip(*[flat[i] for i in chosen], strict=True)
    lengths = torch.ones(len(chosen), dtype=torch.int64)
    ours = ADVANTAGES[name](Scored(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), lengths), **keys)
    assert ours.tolist() == pytest.approx([theirs[i] for i in chosen], rel=1e-7)  # their Bessel factor is float32


def test_overlong_penalty() -> None:
    ours = overlong_penalty(torch.tensor(LENGTHS), 100, overlong_tokens=20, overlong_coef=1.0)
    assert ours.tolist() == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])


def test_repetition_penalty() -> None:
    answers = [torch.tensor(ids, dtype=torch.int64) for ids in ANSWERS]
    ours = [repetition_penalty(ids, repetition_ngram=2, repetition_coef=1.0) for ids in answers]
    assert ours == pytest.approx([0.0, -0.75, -0.5, 0.0, 0.0])
