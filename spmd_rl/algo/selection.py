"""Selects the tokens of the *global* batch that clip-cov and kl-cov mark. Ranks exchange only counts.

keys = covariance(logprobs, advantages, mean_logprob, mean_advantage)      # kl-cov: the highest
keys = clip_cov_keys(keys, ids, clip_cov_low=..., clip_cov_high=...)       # clip-cov: some of the high ones
marked = keys > threshold(count_above, num_marked(total, share))           # count_above sums over ranks
"""

from collections.abc import Callable

import torch
from torch import Tensor

WAYS = 256
"""Parts of each search round; 4 rounds cover float32"""
INF = 0x7F800000
"""Bit pattern of infinity in float32"""


def covariance(logprobs: Tensor, advantages: Tensor, mean_logprob: float, mean_advantage: float) -> Tensor:
    """Return each token's part of the covariance of logprob and advantage, which lowers the entropy.

        Cov_t = (log p_t - mean log p) * (A_t - mean A)

    Source: Cui et al. (arXiv 2505.22617, token-wise centred cross-product).
    Use: `kl_cov` marks the tokens of the highest.

    logprobs, advantages: float [N]; the means are over all tokens of the global batch. Returns float32 [N].
    """
    # Float32 at the end: ranks compare these keys, so each must be one number.
    return ((logprobs.detach().double() - mean_logprob) * (advantages.double() - mean_advantage)).float()


def clip_cov_keys(cov: Tensor, ids: Tensor, *, clip_cov_low: float, clip_cov_high: float) -> Tensor:
    """Order the tokens of high covariance at random, independently of their rank.

        key = uniform(id) where clip_cov_low < Cov < clip_cov_high, else -inf

    Source: Clip-Cov (arXiv 2505.22617).
    Keys: `clip_cov_low`, `clip_cov_high`: the band of the covariance; the authors' code has 1 and 5.
    Use: `clip_cov` marks the tokens of the highest keys.

    cov: float32 [N]; ids: int64 [N], unique for every token of the run, on any rank, such as the sample's seed plus the
    token's place. Returns float32 [N].
    """
    return uniform(ids).where((cov > clip_cov_low) & (cov < clip_cov_high), -torch.inf)


def num_marked(total: int, share: float) -> int:
    """Return the number of tokens to mark: a share of `total`, but at least one if there are any."""
    return min(total, max(1, int(total * share)))


def uniform(ids: Tensor) -> Tensor:
    """Hash each id (int64 [N]) to a number in [0, 1), float32 [N], with the finaliser of SplitMix64."""
    x = ids + -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return ((x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0xFFFFFF).float() / 0x1000000


def counts_above(keys: Tensor, thresholds: Tensor) -> Tensor:
    """Count this rank's keys (float32 [N]) above each threshold (float32 [k]). Returns int64 [k]."""
    ordered = keys.sort().values
    return len(keys) - torch.searchsorted(ordered, thresholds.to(keys.device), right=True)


def threshold(count_above: Callable[[Tensor], Tensor], wanted: int) -> float:
    """Find the lowest threshold with at most `wanted` keys above it; fewer only if keys are equal.

    count_above: maps thresholds (float32 [k]) to the global batch's keys above each (int64 [k]); called at most 4
    times, and equally often on every rank.
    """
    # The search is over the bit patterns of float32, which have the order of the floats.
    # Ordered patterns of -inf and inf; the count above `high` is 0, so it always qualifies.
    low, high = -INF, INF
    while low < high:
        step = -(-(high - low) // WAYS)
        tried = torch.arange(low, high, step)
        enough = count_above(_float(tried)) <= wanted
        first = int(enough.int().argmax()) if bool(enough.any()) else len(tried)
        high = int(tried[first]) if first < len(tried) else high
        low = int(tried[first - 1]) + 1 if first else low
    return float(_float(torch.tensor([high])))


def _float(patterns: Tensor) -> Tensor:
    bits = torch.where(patterns < 0, -patterns | -0x80000000, patterns)
    return bits.to(torch.int32).view(torch.float32)
