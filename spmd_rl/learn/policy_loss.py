"""The token loss of the policy: a named loss of `algo`, the terms beside it, and their settings.

    loss of a token = correction weight * surrogate + KL penalty + terms (entropy bonus, supervised learning)

Left out: the weight of the token in the batch (`prepare.py`), which multiplies all of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from spmd_rl.algo import KL_ESTIMATORS, POLICY_TERMS
from spmd_rl.algo.correction import correction, mismatch
from spmd_rl.algo.inputs import Tokens
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.binding import bind
from spmd_rl.learn.own import policy_loss
from spmd_rl.train.base import Loss

PerToken = tuple[Tensor, Mapping[str, Tensor]]


def bind_loss(settings: AlgorithmConfig, kl_coef: float | None = None) -> Loss:
    """The `Loss` that the settings describe; `kl_coef` is the one now in force (default: `algorithm.kl_coef`)."""
    coefficients = {"sft": settings.sft_coef, "entropy": settings.entropy_coef}
    return partial(
        _loss,
        surrogate=policy_loss(settings),
        level=settings.correction.level,
        from_engine=settings.old_logprobs == "engine",
        correct=None if settings.correction.level == "off" else bind(correction, settings.correction),
        terms=[bind(term, settings) for name, term in POLICY_TERMS.items() if coefficients[name]],
        divergence=KL_ESTIMATORS[settings.kl_estimator],
        kl_coef=settings.kl_coef if kl_coef is None else kl_coef,
    )


def tokens_of(batch: Batch, logprobs: Tensor, entropy: Tensor) -> tuple[Tokens, Tensor | None]:
    """The sampled tokens of a batch of whole trajectories, as `algo` takes them; and their order, if it is another.

    A trajectory of several segments is one sample to `algo`. Without old logprobs the current ones stand in: in the
    first update on fresh samples they are the same numbers.
    """
    order, trajectories = by_trajectory(batch)
    mask, runs = batch.sampled.index, batch.sampled.runs
    if order is not None:
        mask, runs, logprobs, entropy = mask[order], runs[order], logprobs[order], entropy[order]
    tokens = Tokens(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[mask],
        rollout_logprobs=batch.rollout_logprobs[mask],
        advantages=batch.advantages[mask],
        entropy=entropy,
        samples=trajectories,
        segments=runs,
        ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[mask],
        marked=None if batch.marked is None else batch.marked[mask],
    )
    return tokens, order


def by_trajectory(batch: Batch) -> tuple[Tensor | None, Tensor]:
    """The order of the N sampled tokens in which those of a trajectory are neighbours, its segments in order, and the
    number of each one's trajectory in that order: int64 [N], 0, 1, ... without gaps. No order: they are already.

    What is computed over whole trajectories takes tokens in this order; a micro-batch holds all segments of each.
    """
    if batch.trajectories is None:
        return None, batch.sampled.samples
    numbers = batch.trajectories.repeat_interleave(batch.starts.diff(), output_size=batch.num_tokens)
    numbers = numbers[batch.sampled.index]
    order = numbers.argsort(stable=True)
    return order, torch.unique_consecutive(numbers[order], return_inverse=True)[1]


def _loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: Batch,
    *,
    surrogate: Callable[[Tokens], PerToken],
    level: str,
    from_engine: bool,
    correct: Callable[[Tokens], PerToken] | None,
    terms: Sequence[Callable[[Tokens], PerToken]],
    divergence: Callable[[Tensor, Tensor], Tensor],
    kl_coef: float,
) -> PerToken:
    """See `train.base.Loss`."""
    tokens, order = tokens_of(batch, logprobs, entropy)
    loss, quantities = surrogate(replace(tokens, old_logprobs=tokens.rollout_logprobs) if from_engine else tokens)
    quantities = dict(quantities) | {
        "actor/entropy": tokens.entropy.detach(),
        "actor/abs_advantage": tokens.advantages.abs(),
        "train_infer/lag/mean": batch.lags[batch.sampled.index].float(),
    }
    quantities |= mismatch(tokens, level)
    if correct is not None:
        weights, more = correct(tokens)
        loss, quantities = loss * weights, quantities | more
        del quantities["train_infer/ratio"]  # which `mismatch` has
    for term in terms:
        extra, more = term(tokens)
        loss, quantities = loss + extra, quantities | more
    if kl_coef:
        assert tokens.ref_logprobs is not None, "the KL penalty needs reference logprobs"
        kl = divergence(tokens.logprobs, tokens.ref_logprobs)
        loss = loss + kl_coef * kl
        quantities["actor/kl_loss"] = kl.detach()
    if tokens.ref_logprobs is not None:
        quantities["critic/kl"] = tokens.old_logprobs - tokens.ref_logprobs
    return loss if order is None else torch.empty_like(loss).index_copy(0, order, loss), quantities
