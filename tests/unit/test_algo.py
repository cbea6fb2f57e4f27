"""Aggregation and KL by hand; and the settings know the names and the keys of every algorithm."""

from dataclasses import fields

import pytest
import torch

from spmd_rl import algo
from spmd_rl.algo import AGGREGATIONS, KL_ESTIMATORS, kl, selection, shaping, values
from spmd_rl.algo.correction import CORRECTION_LEVELS, correction
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.config.sections import algorithm as schema
from spmd_rl.learn.custom import bind, settings_read


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("token-mean", 1.0),
        ("seq-mean-token-mean", 1.0),
        ("seq-mean-token-sum", (3 + 5 + 1) / 3),
        ("seq-mean-token-sum-norm", (3 + 5 + 1) / 30),
    ],
)
def test_aggregation_weights(name: str, total: float) -> None:
    lengths = torch.tensor([3, 5, 1])
    aggregate = bind(AGGREGATIONS[name], AlgorithmConfig(loss_agg_length=10))
    weights = aggregate(lengths)
    assert float((weights * lengths).sum()) == pytest.approx(total)
    assert aggregate(torch.tensor([], dtype=torch.int64)).numel() == 0
    if name == "seq-mean-token-mean":
        assert (weights * lengths).tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_is_zero_on_equals_and_near_the_truth(name: str) -> None:
    torch.manual_seed(0)
    p = torch.log_softmax(torch.randn(50, dtype=torch.float64), 0)
    q = torch.log_softmax(p + 0.1 * torch.randn(50, dtype=torch.float64), 0)
    assert KL_ESTIMATORS[name](p, p).abs().max() == 0
    truth = float((p.exp() * (p - q)).sum())
    mean = float((p.exp() * KL_ESTIMATORS[name](p, q)).sum())
    assert mean == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize(
    ("said", "known"),
    [
        (schema.SAMPLE_ADVANTAGES, algo.ADVANTAGES),
        (schema.TOKEN_ADVANTAGES, algo.TOKEN_ADVANTAGES),
        (schema.LOSSES, algo.POLICY_LOSSES),
        (schema.LOSS_AGGS, AGGREGATIONS),
    ],
)
def test_settings_know_the_names_and_the_keys_of_each(said, known) -> None:
    """The settings are torch-free, so they keep a copy."""
    assert said == {name: settings_read(function) for name, function in known.items()}


def test_settings_know_the_other_names() -> None:
    assert tuple(KL_ESTIMATORS) == schema.KL_ESTIMATORS
    assert ("off", *CORRECTION_LEVELS) == schema.LEVELS


def test_every_keyword_is_a_setting() -> None:
    modules = (kl, selection, shaping, values)
    functions = [
        f for module in modules for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__
    ]
    functions += [*algo.POLICY_TERMS.values(), *algo.POLICY_LOSSES.values()]
    known = {field.name for field in fields(AlgorithmConfig)}
    read = {key for function in functions if callable(function) for key in settings_read(function)}
    assert {"reward_scale", "value_clip", "target_kl", "clip_cov_low", "sft_coef"} <= read <= known
    assert set(settings_read(correction)) == {field.name for field in fields(schema.CorrectionConfig)}


def test_binding_fills_in_every_key() -> None:
    def function(x, *, clip_low, clip_high, norm_std):
        return x, clip_low, clip_high, norm_std

    assert bind(function, AlgorithmConfig(clip_high=0.3, norm_std=False))(7) == (7, 0.2, 0.3, False)
