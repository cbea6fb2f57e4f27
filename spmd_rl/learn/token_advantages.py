"""Advantages are finished where the samples are trained: per token, and over the global batch.

    finish(batches, plan, settings, kl_reward_coef, policy.layout.data, seed)  # [all]

A token-level estimator, or a KL penalty in the reward, needs logprobs or values, which only the trainer has; whitening,
and the choice of the tokens that clip-cov, kl-cov and several critics treat apart, need sums and counts over all data
shards. These travel; never tokens.
"""

from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from spmd_rl.algo import KL_ESTIMATORS, TOKEN_ADVANTAGES, selection
from spmd_rl.algo.advantages.tokens import token_rewards
from spmd_rl.algo.moments import Moments, merged, whiten
from spmd_rl.algo.shaping import clip
from spmd_rl.algo.values import explained_variance
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.data.seeds import counter_seed
from spmd_rl.distributed import DataShard
from spmd_rl.learn.custom import bind, token_advantage
from spmd_rl.learn.prepare import Plan


def needs_old_logprobs(settings: AlgorithmConfig) -> bool:
    """Whether advantages cannot be finished without the trainer's logprobs."""
    return settings.kl_reward_coef > 0 or settings.loss in SHARES


def finish(
    batches: Sequence[Batch], plan: Plan, settings: AlgorithmConfig, kl_reward_coef: float, data: DataShard, seed: int
) -> dict[str, float]:
    """[all] Bring the advantages of all mini-batches to what the loss reads: float32 [T] at each sampled token.

    kl_reward_coef: the one now in force. data: this rank's shard of the policy's. seed: the run's, for draws. Returns
    the metrics of the critic, if there is one.
    """
    if token_advantage(settings) or settings.kl_reward_coef:
        for batch in batches:
            estimate(batch, settings, kl_reward_coef)
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
        if settings.loss in SHARES:
            mark(batch, settings, total, data, (seed, plan.step))  # [all]
        if settings.masks_by_critics:
            mask_by_critics(batch, settings, total, data)  # [all]
    return metrics


def logged(
    batches: Sequence[Batch], plan: Plan, settings: AlgorithmConfig, data: DataShard, changed: bool = False
) -> Plan:
    """[all] Return the plan with the advantages of the batches, for the sample log, where these are not its own.

    changed: whether more than `finish` has changed them.
    """
    shaped = settings.whiten_advantages or settings.advantage_clip is not None
    differ = bool(token_advantage(settings) or settings.kl_reward_coef or shaped or changed)
    return plan.with_advantages(batches, data) if differ else plan  # [all] the settings are agreed on


def _of_critic(batches: Sequence[Batch], data: DataShard) -> dict[str, float]:
    """[all] Metrics of the values of all data shards and mini-batches."""
    errors = [batch.returns - batch.values for batch in batches]
    critic = [moments_of(batches, column, data) for column in (errors, [b.returns for b in batches])]  # [all]
    metrics = {"critic/explained_variance": explained_variance(*critic)}
    if batches[0].value_spread is not None:  # alike on all ranks
        spread = moments_of(batches, [batch.value_spread for batch in batches], data)  # [all]
        metrics["critic/value_spread/mean"] = spread.mean
    return metrics


def estimate(batch: Batch, settings: AlgorithmConfig, kl_reward_coef: float) -> None:
    """Advantages and returns of each token, from the number that its turn has so far and the KL to the reference.

    A turn is what is credited as one: a turn of an agent, or the whole answer. What lies between turns is in no sum and
    discounts nothing. An estimator of answers or of steps leaves the advantage of a turn at its last token, from where
    it flows back to the turn's beginning, undiscounted if `gamma` is 1; the KL of what is to come counts to the end.
    """
    order, samples = batch.by_trajectory
    index = batch.sampled.index if order is None else batch.sampled.index[order]
    turns = samples
    if batch.turns is not None:
        turns = torch.unique_consecutive(batch.turns[index], return_inverse=True)[1]
    given = batch.advantages[index].double()
    scores = torch.zeros(int(turns.max()) + 1 if len(turns) else 0, dtype=given.dtype)
    scores[turns] = given  # the same at each token of a turn
    kl = None
    if kl_reward_coef:
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        divergence = KL_ESTIMATORS[settings.kl_reward_estimator]
        kl = divergence(batch.old_logprobs[index].double(), batch.ref_logprobs[index].double())
    rewards = token_rewards(scores, turns, kl, kl_reward_coef)
    values = None if batch.values is None else batch.values[index].double()
    estimator = token_advantage(settings)
    if estimator is None:
        advantages = _flow_back(rewards, scores, turns, samples, settings)
        returns = advantages
    elif settings.advantage == "turn_gae":
        advantages, returns = estimator(rewards, values, samples, turns)
    else:
        advantages, returns = estimator(rewards, values, samples)
    batch.advantages = torch.zeros(batch.num_tokens).index_copy(0, index, advantages.float())
    if values is not None:
        batch.returns = torch.zeros(batch.num_tokens).index_copy(0, index, returns.float())


def _flow_back(rewards: Tensor, scores: Tensor, turns: Tensor, samples: Tensor, settings: AlgorithmConfig) -> Tensor:
    """Advantages of tokens from those of their turns, `scores`, and the KL penalties in `rewards`."""
    back = bind(TOKEN_ADVANTAGES["reinforce_returns"], settings)
    if turns is samples:
        return back(rewards, None, samples)[0]
    own = token_rewards(scores, turns)
    return back(own, None, turns)[0] + back(rewards - own, None, samples)[0]


def moments_of(batches: Sequence[Batch], columns: Sequence[Tensor], data: DataShard) -> Moments:
    """[all] Of a column's values at the sampled tokens of all data shards and mini-batches; equal on all ranks.

    columns: float32 [T] of each batch.
    """
    mine = Moments.of(torch.cat([c[batch.loss_mask] for batch, c in zip(batches, columns, strict=True)]))
    records = data.gather("prepare: moments", astuple(mine))  # [all]
    return merged(Moments(*record) for record in records)


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

    keys = selection.covariance(logprobs, advantages, mean_logprob, mean_advantage)
    if settings.loss == "clip_cov":
        keys = bind(selection.clip_cov_keys, settings)(keys, ids)
    batch.marked = highest(batch, keys, total, getattr(settings, SHARES[settings.loss]), data)  # [all]


def mask_by_critics(batch: Batch, settings: AlgorithmConfig, total: int, data: DataShard) -> None:
    """[all] Take the advantage of the tokens over which several critics agree most, and mark those over which they
    differ most: `Batch.disputed`. See `algo.values.ensemble`; parameters as in `mark`."""
    spread = batch.value_spread[batch.loss_mask]
    if share := settings.advantage_mask_ratio:
        agreed = highest(batch, -spread, total, share, data)  # [all]
        batch.advantages = batch.advantages.masked_fill(agreed, 0)
    if settings.entropy_coef and (share := settings.entropy_mask_ratio):
        batch.disputed = highest(batch, spread, total, share, data)  # [all]


def highest(batch: Batch, keys: Tensor, total: int, share: float, data: DataShard) -> Tensor:
    """[all] The sampled tokens of the highest keys (float32 [N]) of the global mini-batch, a share of them: bool [T].

    Of equal keys at the border none are taken. total, data: as in `mark`.
    """

    def count_above(thresholds: Tensor) -> Tensor:
        """[all] How many keys of all shards lie above each threshold."""
        mine = selection.counts_above(keys, thresholds).tolist()
        return torch.tensor(data.gather("prepare: tokens above", mine)).sum(0)

    limit = selection.threshold(count_above, selection.num_marked(total, share))  # [all]
    return torch.zeros_like(batch.loss_mask).masked_scatter(batch.loss_mask, keys > limit)


def token_numbers(batch: Batch, seed: tuple[int, ...]) -> Tensor:
    """A number to draw by for each sampled token, from its sample and its position alone. int64 [N]."""
    firsts = [counter_seed("marked", *seed, *key) - 2**63 for key in batch.keys.tolist()]
    starts = torch.tensor(firsts, dtype=torch.int64).repeat_interleave(batch.starts.diff())
    return (starts + batch.position_ids)[batch.loss_mask]
