"""What becomes of advantages once samples stand on the ranks that train them: per token, and over the global batch.

    finish(batches, plan, settings, kl_reward_coef, world, seed)  # [all]

A token-level estimator, or a KL penalty in the reward, needs logprobs or values, which only the trainer has; whitening
and the choice of tokens (clip-cov, kl-cov) need sums over all ranks. Three numbers, or counts, travel; never tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from spmd_rl.algo import KL_ESTIMATORS, TOKEN_ADVANTAGES, selection
from spmd_rl.algo.advantages.tokens import token_rewards
from spmd_rl.algo.moments import Moments, merged, whiten
from spmd_rl.algo.shaping import clip
from spmd_rl.algo.values import explained_variance
from spmd_rl.batch import Batch, sampled_runs
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.data.seeds import counter_seed
from spmd_rl.distributed import World
from spmd_rl.learn.binding import bind
from spmd_rl.learn.prepare import Plan


def needs_old_logprobs(settings: AlgorithmConfig) -> bool:
    """Whether advantages cannot be finished without the trainer's logprobs."""
    return settings.kl_reward_coef > 0 or settings.loss in _SHARES


def finish(
    batches: Sequence[Batch], plan: Plan, settings: AlgorithmConfig, kl_reward_coef: float, world: World, seed: int
) -> dict[str, float]:
    """[all] Bring the advantages of all mini-batches to what the loss reads: float32 [T] at each sampled token.

    kl_reward_coef: the one now in force. seed: the run's, for draws. Returns what there is to say of the critic.
    """
    metrics: dict[str, float] = {}
    if settings.advantage in TOKEN_ADVANTAGES or settings.kl_reward_coef:
        for batch in batches:
            estimate(batch, settings, kl_reward_coef)
    if settings.uses_critic:
        errors = [batch.returns - batch.values for batch in batches]
        moments = [_moments(batches, column, world) for column in (errors, [b.returns for b in batches])]  # [all]
        metrics["critic/explained_variance"] = explained_variance(*moments)
    if settings.whiten_advantages:
        moments = _moments(batches, [batch.advantages for batch in batches], world)  # [all]
        for batch in batches:
            batch.advantages = whiten(batch.advantages.double(), moments).float() * batch.loss_mask
    if settings.advantage_clip is not None:
        for batch in batches:
            batch.advantages = clip(batch.advantages, settings.advantage_clip)
    if settings.loss in _SHARES:
        for number, batch in enumerate(batches):
            total = int(plan.num_sampled[plan.minibatches == number].sum())
            mark(batch, settings, total, world, (seed, plan.step))  # [all]
    return metrics


def _moments(batches: Sequence[Batch], columns: Sequence[Tensor], world: World) -> Moments:
    """[all] Of a column's values at the sampled tokens of all ranks and mini-batches."""
    mine = Moments.of(torch.cat([c[batch.loss_mask] for batch, c in zip(batches, columns, strict=True)]))
    records = world.gather("prepare: moments", astuple(mine))
    return merged(Moments(*record) for record in records)


def estimate(batch: Batch, settings: AlgorithmConfig, kl_reward_coef: float) -> None:
    """Advantages and returns of each token, from the number that its sample has so far and the KL to the reference.

    An estimator of whole answers leaves their advantage at the last token, from where it flows back undiscounted if
    `gamma` is 1.
    """
    mask = batch.loss_mask
    samples, _ = sampled_runs(batch)
    given = batch.advantages[mask].double()
    scores = torch.zeros(int(samples.max()) + 1 if len(samples) else 0, dtype=given.dtype)
    scores[samples] = given  # the same at each token of a sample
    kl = None
    if kl_reward_coef:
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        divergence = KL_ESTIMATORS[settings.kl_reward_estimator]
        kl = divergence(batch.old_logprobs[mask].double(), batch.ref_logprobs[mask].double())
    rewards = token_rewards(scores, samples, kl, kl_reward_coef)
    estimator = bind(TOKEN_ADVANTAGES.get(settings.advantage, TOKEN_ADVANTAGES["reinforce_returns"]), settings)
    values = None if batch.values is None else batch.values[mask].double()
    advantages, returns = estimator(rewards, values, samples)
    batch.advantages = torch.zeros(batch.num_tokens).masked_scatter(mask, advantages.float())
    if values is not None:
        batch.returns = torch.zeros(batch.num_tokens).masked_scatter(mask, returns.float())


def mark(batch: Batch, settings: AlgorithmConfig, total: int, world: World, seed: tuple[int, ...]) -> None:
    """[all] Choose tokens of the mini-batch by the covariance of logprob and advantage (`selection.py`).

    total: sampled tokens of the global mini-batch.
    """
    mask = batch.loss_mask
    assert batch.old_logprobs is not None
    logprobs, advantages = batch.old_logprobs[mask], batch.advantages[mask]
    sums = {"logprobs": float(logprobs.double().sum()), "advantages": float(advantages.double().sum())}
    sums = world.reduce("prepare: means for the covariance", sums)  # [all]
    keys = selection.covariance(
        logprobs, advantages, sums["logprobs"] / max(1, total), sums["advantages"] / max(1, total)
    )
    if settings.loss == "clip_cov":
        keys = bind(selection.clip_cov_keys, settings)(keys, _ids(batch, seed))
    share = getattr(settings, _SHARES[settings.loss])
    limit = selection.threshold(_over_ranks(keys, world), selection.num_marked(total, share))  # [all]
    batch.marked = torch.zeros_like(mask).masked_scatter(mask, keys > limit)


_SHARES = {"clip_cov": "clip_cov_ratio", "kl_cov": "kl_cov_ratio"}
"""Losses that mark tokens, and the key of their share."""


def _over_ranks(keys: Tensor, world: World) -> Callable[[Tensor], Tensor]:
    """How many keys of all ranks lie above each threshold."""

    def count(thresholds: Tensor) -> Tensor:
        """[all]"""
        mine = selection.counts_above(keys, thresholds).tolist()
        return torch.tensor(world.gather("prepare: tokens above", mine)).sum(0)

    return count


def _ids(batch: Batch, seed: tuple[int, ...]) -> Tensor:
    """A number for each sampled token that depends on its sample and its place alone. int64 [N]."""
    firsts = [counter_seed("marked", *seed, *key) - 2**63 for key in batch.keys.tolist()]
    starts = torch.tensor(firsts, dtype=torch.int64).repeat_interleave(batch.starts.diff())
    return (starts + batch.position_ids)[batch.loss_mask]
