"""Aggregations against the published averages, as loops over padded rows, and their degenerate lengths."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spmd_rl.algo import aggregation
from spmd_rl.algo.aggregation import seq_mean_token_mean, seq_mean_token_sum, seq_mean_token_sum_norm, token_mean

Loss = list[list[float]]

PUBLISHED: dict[Callable[..., Tensor], Callable[[Loss], float]] = {
    token_mean: lambda rows: sum(x for row in rows for x in row) / sum(len(row) for row in rows),
    seq_mean_token_mean: lambda rows: sum(sum(row) / len(row) for row in rows) / len(rows),
    seq_mean_token_sum: lambda rows: sum(sum(row) for row in rows) / len(rows),
    seq_mean_token_sum_norm: lambda rows: sum(sum(row) / 16 for row in rows) / len(rows),
}


def keys(function: Callable[..., Tensor]) -> dict[str, int]:
    return {"loss_agg_length": 16} if "loss_agg_length" in inspect.signature(function).parameters else {}


def test_every_aggregation_is_here() -> None:
    public = {f for name, f in inspect.getmembers(aggregation, inspect.isfunction) if not name.startswith("_")}
    assert public == set(PUBLISHED)


@pytest.mark.parametrize("function", list(PUBLISHED))
@pytest.mark.parametrize("lengths", [(3, 5, 1), (7,), (2, 2, 2, 2)])
def test_the_weighted_sum_is_the_published_average(function: Callable[..., Tensor], lengths: tuple[int, ...]) -> None:
    rows = [[(i + 1) * 0.3 - t * 0.7 for t in range(n)] for i, n in enumerate(lengths)]
    weights = function(torch.tensor(lengths), **keys(function))
    assert weights.dtype == torch.float64
    total = sum(w * x for w, row in zip(weights.tolist(), rows, strict=True) for x in row)
    assert total == pytest.approx(PUBLISHED[function](rows), rel=1e-12)


@pytest.mark.parametrize("function", list(PUBLISHED))
def test_no_samples_and_no_tokens(function: Callable[..., Tensor]) -> None:
    assert function(torch.zeros(0, dtype=torch.int64), **keys(function)).numel() == 0
    assert torch.isfinite(function(torch.zeros(3, dtype=torch.int64), **keys(function))).all()


def test_the_constant_is_no_width() -> None:
    """A longer answer elsewhere in the batch does not change the weight of the others' tokens."""
    short = seq_mean_token_sum_norm(torch.tensor([3, 5]), loss_agg_length=100)
    long = seq_mean_token_sum_norm(torch.tensor([3, 900]), loss_agg_length=100)
    assert short.tolist() == long.tolist() == [1 / 200, 1 / 200]
