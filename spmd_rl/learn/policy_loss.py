"""The token loss of the policy: a named loss of `algo` and the KL penalty, bound to their settings."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from spmd_rl.algo import KL_ESTIMATORS, LOSSES
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.train.base import Loss


def bind(settings: AlgorithmConfig) -> Loss:
    """The `Loss` that the settings describe."""
    surrogate = partial(LOSSES[settings.loss], clip_low=settings.clip_low, clip_high=settings.clip_high)
    divergence = KL_ESTIMATORS[settings.kl_estimator]
    return partial(_loss, surrogate=surrogate, divergence=divergence, kl_coef=settings.kl_coef)


def _loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: Batch,
    *,
    surrogate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]],
    divergence: Callable[[Tensor, Tensor], Tensor],
    kl_coef: float,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """See `train.base.Loss`. Without old logprobs the current ones stand in: the first update on fresh samples."""
    mask = batch.loss_mask
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[mask]
    loss, quantities = surrogate(logprobs, old, batch.advantages[mask])
    quantities["actor/entropy"] = entropy
    quantities["train_infer/abs_diff/mean"] = (old - batch.rollout_logprobs[mask]).abs()
    if kl_coef:
        assert batch.ref_logprobs is not None, "the KL penalty needs reference logprobs"
        kl = divergence(logprobs, batch.ref_logprobs[mask])
        loss = loss + kl_coef * kl
        quantities["actor/kl_loss"] = kl.detach()
    with torch.no_grad():
        quantities["actor/abs_advantage"] = batch.advantages[mask].abs()
    return loss, quantities
