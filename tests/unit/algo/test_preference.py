"""Preference losses against TRL's own trainers, whose values `trl_preference.py` has frozen."""

import json
from pathlib import Path

import pytest
import torch

from spmd_rl.algo.inputs import Judged, Pairs
from spmd_rl.algo.preference import JUDGED_LOSSES, PAIR_LOSSES
from spmd_rl.config.sections.preference import LOSSES, PreferenceConfig
from spmd_rl.learn.custom import bind, settings_read

TRL = json.loads(Path(__file__).with_name("trl_preference.json").read_text())
POLICY, REFERENCE = torch.tensor(TRL["policy"]), torch.tensor(TRL["reference"])
LENGTHS = torch.tensor(TRL["lengths"])
COUNT = len(LENGTHS) // 2


def pairs(rewards: torch.Tensor) -> Pairs:
    return Pairs(rewards[:COUNT], rewards[COUNT:], LENGTHS[:COUNT], LENGTHS[COUNT:])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dpo", {"beta": 0.1}),
        ("ipo", {"beta": 0.2}),
        ("hinge", {"beta": 0.3}),
        ("dpo length_normalised", {"beta": 2.0, "length_normalised": True}),
        ("dpo label_smoothing", {"beta": 0.1, "label_smoothing": 0.2}),
        ("simpo", {"beta": 2.0, "label_smoothing": 0.1, "margin": 0.5}),
    ],
)
def test_losses_of_pairs_are_those_of_trl(name: str, settings: dict) -> None:
    cfg = PreferenceConfig(loss=name.split()[0], **settings)
    rewards = POLICY - REFERENCE if cfg.uses_reference else POLICY
    found = bind(PAIR_LOSSES[cfg.loss], cfg)(pairs(rewards))
    wanted = TRL[name] if isinstance(TRL[name], list) else TRL[name]["losses"]
    assert found.tolist() == pytest.approx(wanted, abs=1e-6) and len(set(wanted)) == COUNT


@pytest.mark.parametrize("name", ["kto", "kto above"])
def test_kto_is_that_of_trl(name: str) -> None:
    wanted = TRL[name]
    cfg = PreferenceConfig(loss="kto", undesirable_weight=1.2)
    judged = Judged(POLICY - REFERENCE, torch.arange(2 * COUNT) < COUNT, wanted["metrics"]["kl"])
    found = bind(JUDGED_LOSSES["kto"], cfg)(judged)
    assert found.mean().item() == pytest.approx(wanted["mean"], abs=1e-6)
    assert (wanted["metrics"]["kl"] > 0) == (name == "kto above")


def test_settings_name_the_losses_and_what_each_reads() -> None:
    functions = PAIR_LOSSES | JUDGED_LOSSES
    assert functions.keys() == LOSSES.keys()
    for name, function in functions.items():
        assert set(settings_read(function)) - {"beta"} == set(LOSSES[name]) - {"reference_free"}
