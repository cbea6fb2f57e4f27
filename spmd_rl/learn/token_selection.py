"""The tokens that clip-cov and kl-cov treat apart: chosen over the global mini-batch, wherever its samples lie.

Only sums and counts travel between data shards; never tokens.
"""

import torch
from torch import Tensor

from spmd_rl.algo import selection
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.data.seeds import counter_seed
from spmd_rl.distributed import DataShard
from spmd_rl.learn.binding import bind

SHARES = {"clip_cov": "clip_cov_ratio", "kl_cov": "kl_cov_ratio"}
"""Losses that mark tokens, and the key of their share."""


def mark(batch: Batch, settings: AlgorithmConfig, total: int, data: DataShard, seed: tuple[int, ...]) -> None:
    """[all] Choose tokens of the mini-batch by the covariance of logprob and advantage: `Batch.marked`.

    total: sampled tokens of the global mini-batch. data: this rank's shard of the policy's. seed: the step's.
    """
    mask = batch.loss_mask
    assert batch.old_logprobs is not None
    logprobs, advantages, ids = batch.old_logprobs[mask], batch.advantages[mask], token_numbers(batch, seed)
    sums = {"logprobs": float(logprobs.double().sum()), "advantages": float(advantages.double().sum())}
    sums = data.reduce("prepare: means for the covariance", sums)  # [all]
    mean_logprob, mean_advantage = (sums[name] / max(1, total) for name in ("logprobs", "advantages"))

    def count_above(thresholds: Tensor) -> Tensor:
        """[all] How many keys of all shards lie above each threshold."""
        mine = selection.counts_above(keys, thresholds).tolist()
        return torch.tensor(data.gather("prepare: tokens above", mine)).sum(0)

    keys = selection.covariance(logprobs, advantages, mean_logprob, mean_advantage)
    if settings.loss == "clip_cov":
        keys = bind(selection.clip_cov_keys, settings)(keys, ids)
    share = getattr(settings, SHARES[settings.loss])
    limit = selection.threshold(count_above, selection.num_marked(total, share))  # [all]
    batch.marked = torch.zeros_like(mask).masked_scatter(mask, keys > limit)


def token_numbers(batch: Batch, seed: tuple[int, ...]) -> Tensor:
    """A number to draw by for each sampled token, from its sample and its position alone. int64 [N]."""
    firsts = [counter_seed("marked", *seed, *key) - 2**63 for key in batch.keys.tolist()]
    starts = torch.tensor(firsts, dtype=torch.int64).repeat_interleave(batch.starts.diff())
    return (starts + batch.position_ids)[batch.loss_mask]
