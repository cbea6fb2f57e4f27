"""The choice of tokens over the global batch: equal to a sort of all of them, whatever rank they lie on."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algo.moments import Moments, merged
from spmd_rl.algo.selection import clip_cov_keys, counts_above, covariance, num_marked, threshold, uniform

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def agreed(parts: list[torch.Tensor], wanted: int) -> tuple[float, int]:
    """The threshold that ranks with these keys agree on, and how often they met."""
    meetings = 0

    def count(thresholds: torch.Tensor) -> torch.Tensor:
        nonlocal meetings
        meetings += 1
        return sum((counts_above(part, thresholds) for part in parts), torch.zeros(len(thresholds), dtype=torch.int64))

    return threshold(count, wanted), meetings


@given(parts=st.lists(st.lists(FLOATS, max_size=8), min_size=1, max_size=4), wanted=st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_the_threshold_is_the_next_key_down(parts: list[list[float]], wanted: int) -> None:
    ours, meetings = agreed([torch.tensor(part, dtype=torch.float32) for part in parts], wanted)
    keys = sorted((float(np.float32(v)) for part in parts for v in part), reverse=True)
    assert ours == (keys[wanted] if wanted < len(keys) else -math.inf)
    assert sum(key > ours for key in keys) <= wanted
    assert meetings <= 4


def test_distinct_keys_are_marked_to_the_number() -> None:
    keys = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).float() - 500
    for wanted in (0, 1, 7, 999, 1000):
        limit, _ = agreed(list(keys.split(300)), wanted)
        assert int((keys > limit).sum()) == wanted
    assert agreed([keys[:0]], 3)[0] == -math.inf, "nobody has a token"


def test_equal_keys_at_the_limit_are_left_out() -> None:
    """As when no advantage differs: then nothing is marked, not everything."""
    limit, _ = agreed([torch.zeros(50)], 3)
    assert not (torch.zeros(50) > limit).any()


def test_covariance_equals_the_loop_on_any_split() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(2, 60, generator=generator)
    parts = list(zip(logprobs.split(17), advantages.split(17), strict=True))
    mean_logprob, mean_advantage = (merged(Moments.of(part[k]) for part in parts).mean for k in (0, 1))
    ours = torch.cat([covariance(*part, mean_logprob, mean_advantage) for part in parts])
    p, a = logprobs.double().numpy(), advantages.double().numpy()
    assert ours.tolist() == pytest.approx(
        [(x - p.mean()) * (y - a.mean()) for x, y in zip(p, a, strict=True)], rel=1e-6
    )
    assert float(ours.double().mean()) == pytest.approx(np.cov(p, a, ddof=0)[0, 1], rel=1e-5), (
        "their mean is the covariance"
    )


def test_clip_cov_draws_evenly_from_the_band() -> None:
    cov = torch.linspace(-1, 8, 9000)
    times = torch.zeros(9000)
    for step in range(200):
        keys = clip_cov_keys(cov, torch.arange(9000) + step * 100_000, clip_cov_low=1.0, clip_cov_high=5.0)
        limit, _ = agreed([keys[:4000], keys[4000:]], num_marked(9000, 0.05))
        times += keys > limit
    inside = (cov > 1) & (cov < 5)
    assert not times[~inside].any()
    assert float(times.sum()) == pytest.approx(200 * 450, rel=1e-3)
    per_token = times[inside]
    assert float(per_token.mean()) == pytest.approx(22.5, rel=0.01)
    assert float(per_token.var()) == pytest.approx(22.5 * (1 - 450 / 4000), rel=0.1), "binomial"


def test_uniform_depends_on_the_id_alone_and_is_even() -> None:
    ids = torch.arange(-50_000, 50_000) * 7919 + 2**62
    values = uniform(ids)
    assert torch.equal(values.flip(0), uniform(ids.flip(0)))
    assert float(values.min()) >= 0 and float(values.max()) < 1
    histogram = torch.histc(values, bins=20, min=0, max=1)
    assert float((histogram - 5000).abs().max()) < 5 * 5000**0.5
    # SplitMix64 from state 0: the first output of the reference implementation, of which these are the low 24 bits.
    assert float(uniform(torch.tensor([0]))) == (0xE220A8397B1DCDAF & 0xFFFFFF) / 2**24


def test_at_least_one_is_marked_where_there_are_any() -> None:
    assert [num_marked(total, 0.002) for total in (0, 1, 499, 500, 1000)] == [0, 1, 1, 1, 2]
