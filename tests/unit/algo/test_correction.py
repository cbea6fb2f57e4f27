"""The train-inference correction against loops: levels, truncation, masks, and logprobs that make no sense."""

import math
from dataclasses import replace

import pytest
import torch

from spmd_rl.algo.correction import CORRECTION_LEVELS, correction
from tests.unit.algo.cases import Sample, samples, tokens

LENGTHS = (4, 1, 8, 6)
OPEN = {"upper": None, "mask_low": None, "mask_high": None}


def by_hand(row: Sample, level: str) -> list[float]:
    """The ratio of trainer to engine at each token, as a product of probabilities and a root."""
    steps = [math.exp(o) / math.exp(e) for o, e in zip(row.old, row.engine, strict=True)]
    out = []
    for t, turn in enumerate(row.turns):
        if level == "token":
            mine, root = [steps[t]], 1
        elif level == "segment":
            mine = [step for step, other in zip(steps, row.turns, strict=True) if other == turn]
            root = len(mine)
        else:
            mine, root = steps, 1 if level == "sequence" else len(steps)
        out.append(math.prod(mine) ** (1 / root))
    return out


@pytest.mark.parametrize("level", list(CORRECTION_LEVELS))
@pytest.mark.parametrize("upper", [None, 1.1])
@pytest.mark.parametrize(("low", "high"), [(None, None), (0.95, None), (None, 1.15), (0.95, 1.15)])
def test_weights(level: str, upper: float | None, low: float | None, high: float | None) -> None:
    rows = samples(3, LENGTHS)
    ratios = [ratio for row in rows for ratio in by_hand(row, level)]
    weights, quantities = correction(tokens(rows), level=level, upper=upper, mask_low=low, mask_high=high)
    expected, truncated, masked = [], [], []
    for ratio in ratios:
        out = (low is not None and ratio < low) or (high is not None and ratio > high)
        over = upper is not None and ratio > upper
        masked.append(float(out))
        truncated.append(float(over and not out))
        expected.append(0.0 if out else upper if over else ratio)
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)
    assert quantities["train_infer/ratio"].tolist() == pytest.approx(ratios, rel=1e-12)
    assert quantities["train_infer/truncated"].tolist() == truncated
    assert quantities["train_infer/masked"].tolist() == masked
    assert upper is None or sum(truncated) > 0 or low is not None or high is not None
    assert low is None or high is None or 0 < sum(masked) < len(masked)


@pytest.mark.parametrize("level", list(CORRECTION_LEVELS))
def test_no_gradient_and_no_weight_where_the_engine_agrees(level: str) -> None:
    data = tokens(samples(1, LENGTHS))
    data = replace(data, old_logprobs=data.old_logprobs.requires_grad_(), rollout_logprobs=data.old_logprobs.detach())
    weights, _ = correction(data, level=level, upper=2.0, mask_low=0.5, mask_high=2.0)
    assert not weights.requires_grad
    assert weights.tolist() == [1.0] * sum(LENGTHS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", list(CORRECTION_LEVELS))
def test_impossible_tokens_stay_finite(level: str, dtype: torch.dtype) -> None:
    """An engine that gives its own token no probability at all, and one that is 100 nats off."""
    rows = samples(1, LENGTHS)
    rows[0].engine[0] = -math.inf
    rows[2].engine = [value + 100 for value in rows[2].engine]
    weights, quantities = correction(tokens(rows, dtype), level=level, **OPEN)
    assert torch.isfinite(weights).all() and all(torch.isfinite(q).all() for q in quantities.values())
    assert weights[0] == pytest.approx(math.exp(20)) and weights[5] == pytest.approx(math.exp(-20))
    bounded, _ = correction(tokens(rows, dtype), level=level, upper=2.0, mask_low=0.5, mask_high=None)
    assert bounded[0] == 2 and bounded[5] == 0


def test_nothing_to_correct() -> None:
    weights, _ = correction(tokens([]), level="sequence", **OPEN)
    assert weights.shape == (0,)


def test_levels_of_one_token_agree() -> None:
    data = tokens(samples(5, (1, 1, 1)))
    results = [correction(data, level=level, **OPEN)[0].tolist() for level in CORRECTION_LEVELS]
    assert all(result == pytest.approx(results[0]) for result in results)
