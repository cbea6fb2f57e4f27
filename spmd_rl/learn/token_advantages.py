"""The part of advantages that is computed on trainer ranks: per token, and over the global batch.

Token-level estimators and a KL penalty in the reward (`turn_kl`) need logprobs or values of the trainer; whitening,
clip-cov and kl-cov need sums over all data shards. Tokens are never communicated.
"""

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import torch
from torch import Tensor

from spmd_rl.algo import KL_ESTIMATORS, selection
from spmd_rl.algo.advantages.tokens import token_rewards
from spmd_rl.algo.moments import Moments, merged, whiten
from spmd_rl.algo.shaping import clip
from spmd_rl.algo.values import explained_variance
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.data.seeds import counter_seed
from spmd_rl.distributed import DataShard
from spmd_rl.learn.custom import bind, token_advantage
from spmd_rl.learn.prepare import UpdatePlan


def needs_old_logprobs(settings: AlgorithmConfig) -> bool:
    """Return True if advantages need the trainer's logprobs."""
    return settings.kl_reward_coef > 0 or settings.loss in MARKED_SHARE_KEYS


def finish(
    batches: Sequence[Batch], plan: UpdatePlan, settings: AlgorithmConfig, coef: float, data: DataShard, seed: int
) -> dict[str, float]:
    """[all] Set the final advantages of all mini-batches, float32 [T]; return the critic's metrics.

    coef: the current `kl_reward_coef`. data: this rank's data shard. seed: the run's.
    """
    if token_advantage(settings):
        for batch in batches:
            estimate(batch, settings, coef)
    metrics = _of_critic(batches, data) if settings.uses_critic else {}  # [all]
    if settings.whiten_advantages:
        moments = moments_of(batches, [batch.advantages for batch in batches], data)  # [all]
        for batch in batches:
            batch.advantages = whiten(batch.advantages.double(), moments).float() * batch.loss_mask
    if settings.advantage_clip is not None:
        for batch in batches:
            batch.advantages = clip(batch.advantages, settings.advantage_clip)
    for number, batch in enumerate(batches):
        total = int(plan.num_sampled[plan.minibatches == number].sum())
        if settings.loss in MARKED_SHARE_KEYS:
            mark(batch, settings, total, data, (seed, plan.step))  # [all]
    return metrics


def logged(
    batches: Sequence[Batch], plan: UpdatePlan, settings: AlgorithmConfig, data: DataShard, changed: bool = False
) -> UpdatePlan:
    """[all] Return the plan with the batches' advantages, if they differ. changed: True if other code than `finish` has
    changed them.
    """
    shaped = settings.whiten_advantages or settings.advantage_clip is not None
    differ = bool(token_advantage(settings) or settings.kl_reward_coef or shaped or changed)
    # The settings are agreed on, so all ranks take the same branch.
    return plan.with_advantages(batches, data) if differ else plan  # [all]


def _of_critic(batches: Sequence[Batch], data: DataShard) -> dict[str, float]:
    """[all] Return metrics of all the critic's values."""
    errors = [batch.returns - batch.values for batch in batches]
    critic = [moments_of(batches, column, data) for column in (errors, [b.returns for b in batches])]  # [all]
    return {"critic/explained_variance": explained_variance(*critic)}


def turn_kl(batches: list[Batch], plan: UpdatePlan, count: int, settings: AlgorithmConfig, data: DataShard) -> Tensor:
    """[all] Estimate the KL to the reference of each turn or answer, summed over its tokens: float64 [count].

    count: turns in `UpdatePlan.turns`, or answers. One that does not train has 0.
    """
    own, mine = [], (plan.data_rank == data.rank).repeat(plan.num_spans)
    for number, batch in enumerate(batches):
        lengths = plan.span_lengths[mine & (plan.minibatches == number).repeat(plan.num_spans)]
        spans = torch.arange(len(lengths)).repeat_interleave(torch.from_numpy(lengths))
        own += torch.zeros(len(lengths), dtype=torch.float64).index_add(0, spans, _kl(batch, settings)).tolist()
    of_spans, shards = np.zeros(len(plan.turns)), plan.data_rank.repeat(plan.num_spans)
    for shard, values in enumerate(data.gather("prepare: KL of turns", own)):  # [all]
        of_spans[shards == shard] = values
    return torch.from_numpy(np.bincount(plan.turns, of_spans, count))


def _kl(batch: Batch, settings: AlgorithmConfig, index: Tensor | None = None) -> Tensor:
    """Estimate the KL of the policy before the update at the sampled tokens `index` (default: all): float64 [N]."""
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    index = batch.sampled.index if index is None else index
    divergence = KL_ESTIMATORS[settings.kl_reward_estimator]
    return divergence(batch.old_logprobs[index].double(), batch.ref_logprobs[index].double())


def estimate(batch: Batch, settings: AlgorithmConfig, kl_reward_coef: float) -> None:
    """Set each token's advantage and return, from its turn's reward and the KL to the reference.

    A turn is an agent's, or the whole answer. Tokens between turns are neither summed nor discounted.
    """
    order, samples = batch.by_trajectory
    index = batch.sampled.index if order is None else batch.sampled.index[order]
    turns = samples
    if batch.turns is not None:
        turns = torch.unique_consecutive(batch.turns[index], return_inverse=True)[1]
    # So far the column has the reward of each turn at all its tokens.
    given = batch.advantages[index].double()
    scores = torch.zeros(int(turns.max()) + 1 if len(turns) else 0, dtype=given.dtype)
    scores[turns] = given  # the same at each token of a turn
    kl = _kl(batch, settings, index) if kl_reward_coef else None
    rewards = token_rewards(scores, turns, kl, kl_reward_coef)
    values = None if batch.values is None else batch.values[index].double()
    estimator = token_advantage(settings)
    assert estimator is not None
    if settings.advantage == "turn_gae":
        advantages, returns = estimator(rewards, values, samples, turns)
    else:
        advantages, returns = estimator(rewards, values, samples)
    batch.advantages = torch.zeros(batch.num_tokens).index_copy(0, index, advantages.float())
    if values is not None:
        batch.returns = torch.zeros(batch.num_tokens).index_copy(0, index, returns.float())


def moments_of(batches: Sequence[Batch], columns: Sequence[Tensor], data: DataShard) -> Moments:
    """[all] Return moments of a column at all sampled tokens. columns: float32 [T] per batch."""
    mine = Moments.of(torch.cat([c[batch.loss_mask] for batch, c in zip(batches, columns, strict=True)]))
    records = data.gather("prepare: moments", astuple(mine))  # [all]
    return merged(Moments(*record) for record in records)


MARKED_SHARE_KEYS = {"clip_cov": "clip_cov_ratio", "kl_cov": "kl_cov_ratio"}


def mark(batch: Batch, settings: AlgorithmConfig, total: int, data: DataShard, seed: tuple[int, ...]) -> None:
    """[all] Set `Batch.marked` by the covariance of logprob and advantage. total: sampled tokens of the global
    mini-batch. data: this rank's data shard. seed: of the step.
    """
    mask = batch.loss_mask
    assert batch.old_logprobs is not None
    logprobs, advantages, ids = batch.old_logprobs[mask], batch.advantages[mask], token_numbers(batch, seed)
    sums = {"logprobs": float(logprobs.double().sum()), "advantages": float(advantages.double().sum())}
    sums = data.reduce("prepare: means for the covariance", sums)  # [all]
    mean_logprob, mean_advantage = (sums[name] / max(1, total) for name in ("logprobs", "advantages"))

    keys = selection.covariance(logprobs, advantages, mean_logprob, mean_advantage)
    if settings.loss == "clip_cov":
        keys = bind(selection.clip_cov_keys, settings)(keys, ids)
    batch.marked = highest(batch, keys, total, getattr(settings, MARKED_SHARE_KEYS[settings.loss]), data)  # [all]


def highest(batch: Batch, keys: Tensor, total: int, share: float, data: DataShard) -> Tensor:
    """[all] Return the mask, bool [T], of the share of the mini-batch's sampled tokens with the highest keys.

    keys: float32 [N]; equal ones at the threshold are left out. total, data: as in `mark`.
    """

    def count_above(thresholds: Tensor) -> Tensor:
        """[all] Count the keys of all shards above each threshold."""
        mine = selection.counts_above(keys, thresholds).tolist()
        return torch.tensor(data.gather("prepare: tokens above", mine)).sum(0)  # [all]

    limit = selection.threshold(count_above, selection.num_marked(total, share))  # [all]
    return torch.zeros_like(batch.loss_mask).masked_scatter(batch.loss_mask, keys > limit)


def token_numbers(batch: Batch, seed: tuple[int, ...]) -> Tensor:
    """Return a random number for each sampled token, a function of its sample and position. int64 [N]."""
    firsts = [counter_seed("marked", *seed, *key) - 2**63 for key in batch.keys.tolist()]
    starts = torch.tensor(firsts, dtype=torch.int64).repeat_interleave(batch.starts.diff())
    return (starts + batch.position_ids)[batch.loss_mask]
