"""The update: token losses, optimizer steps, and the mismatch between engine and trainer.

    loss of a token = correction weight * surrogate + KL penalty + terms (entropy bonus, supervised learning)

The backend multiplies each token's loss by `Batch.weights`, its weight in the global batch.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from spmd_rl.algo import KL_ESTIMATORS, POLICY_TERMS
from spmd_rl.algo.correction import correction, effective_share, mismatch
from spmd_rl.algo.inputs import Tokens
from spmd_rl.algo.values import value_loss
from spmd_rl.base.errors import RunFailed, tell
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.config.sections.algorithm import BoundsConfig
from spmd_rl.distributed import DataShard, World
from spmd_rl.learn.custom import bind, policy_loss
from spmd_rl.train.base import BoundLoss, BoundValueLoss, Metrics, PolicyRole

PerToken = tuple[Tensor, Mapping[str, Tensor]]


def bind_loss(settings: AlgorithmConfig, kl_coef: float | None = None) -> BoundLoss:
    """Return the `BoundLoss` of the settings; kl_coef: default `algorithm.kl_coef`."""
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
    """Return the sampled tokens of whole trajectories as `algo` takes them, and their order, if it differs.

    A trajectory of several segments is one sample to `algo`. Missing old logprobs are the current ones, as in the first
    update on fresh samples.
    """
    order, trajectories = batch.by_trajectory
    mask, spans = batch.sampled.index, batch.sampled.spans
    if order is not None:
        mask, spans, logprobs, entropy = mask[order], spans[order], logprobs[order], entropy[order]
    tokens = Tokens(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[mask],
        rollout_logprobs=batch.rollout_logprobs[mask],
        advantages=batch.advantages[mask],
        entropy=entropy,
        samples=trajectories,
        segments=spans,
        ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[mask],
        marked=None if batch.marked is None else batch.marked[mask],
        right=None if batch.right is None else batch.right[mask],
    )
    return tokens, order


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
    tokens, order = tokens_of(batch, logprobs, entropy)
    # With `old_logprobs=engine` the engine's logprobs are the proximal policy's.
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
        # `mismatch` reports its mean, greatest and least value.
        del quantities["train_infer/ratio"]
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


def bind_value_loss(settings: AlgorithmConfig) -> BoundValueLoss:
    """Return the `BoundValueLoss` of the settings."""
    return partial(_value_loss, error=bind(value_loss, settings))


def _value_loss(
    values: Tensor, batch: Batch, *, error: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    assert batch.values is not None and batch.returns is not None
    old, returns = batch.values[batch.sampled.index], batch.returns[batch.sampled.index]
    loss, quantities = error(values, old, returns)
    return loss, quantities | {"critic/values/mean": old, "critic/returns/mean": returns}


def update(policy: PolicyRole, batches: Iterable[Batch], loss: BoundLoss, temperature: float = 1.0) -> Metrics:
    """[all] Run one optimizer step per mini-batch; return means of the metrics."""
    with policy.awake():
        return with_ess(mean_over([policy.update(batch, loss, temperature) for batch in batches], "actor"))  # [all]


def measure(data: DataShard, batch: Batch, outputs: Sequence[Tensor], loss: Callable[..., PerToken]) -> Metrics:
    """[all] Return a global batch's loss and means of its metrics, without an update.

    outputs: of the role, [T] each, as the loss takes them.
    """
    index = batch.sampled.index
    per_token, quantities = loss(*(values[index] for values in outputs), batch)
    sums = {"loss": per_token * batch.weights[index], "num_tokens": torch.ones_like(per_token), **quantities}
    own = {name: float(values.double().sum()) for name, values in sums.items()}
    found = data.reduce("eval: loss", own, "sum")  # [all]
    count, total = found.pop("num_tokens"), found.pop("loss")
    return {name: value / max(count, 1.0) for name, value in found.items()} | {"loss": total}


def nll(logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return each sampled token's negative log-likelihood, in nats."""
    return -logprobs, {"actor/entropy": entropy.detach()}


def nothing(logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return zeros, to which another loss is added."""
    return torch.zeros_like(logprobs), {"actor/entropy": entropy.detach()}


def mean_over(
    updates: list[Metrics], role: str, weight: Callable[[int, str], float] = lambda number, key: 1.0
) -> Metrics:
    """Return each metric's mean over the updates that have it (`/max`, `/min`: the extreme), under the names of
    docs/METRICS.md. weight: of (update's number, metric's name).
    """
    keys = dict.fromkeys(key for one in updates for key in one)
    found = {key: [(one[key], weight(i, key)) for i, one in enumerate(updates) if key in one] for key in keys}
    return {_name(key, role): _over_updates(key, values) for key, values in found.items()}


def _over_updates(key: str, values: list[tuple[float, float]]) -> float:
    extreme = {"max": max, "min": min}.get(key.rpartition("/")[2])
    if extreme:
        return extreme(value for value, _ in values)
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def _name(key: str, role: str) -> str:
    name = _NAMES.get((role, key), key)
    # `moe/*` is the policy's, so metrics of the critic's experts need a prefix.
    own = role == "critic" and name.startswith("moe/")
    return name if "/" in name and not own else f"{role}/{name}"


_NAMES = {
    ("actor", "loss"): "pg_loss",
    ("actor", "num_microbatches"): "backward_steps",
    ("actor", "changed_share"): "publish/changed_share",
    ("critic", "num_microbatches"): "backward_steps",
}


SQUARE = "train_infer/ratio_square/mean"
ESS = "train_infer/ess"


def measure_mismatch(batches: Sequence[Batch], level: str, data: DataShard) -> Metrics:
    """[all] Return means over the sampled tokens of all data shards and mini-batches; empty without tokens."""
    count, sums = 0, dict.fromkeys(("train_infer/abs_diff/mean", "train_infer/ratio/mean", SQUARE), 0.0)
    for batch in batches:
        assert batch.old_logprobs is not None
        old = batch.old_logprobs[batch.sampled.index]
        tokens, _ = tokens_of(batch, old, old)
        found = mismatch(tokens, level)
        count += len(old)
        sums = {name: total + float(found[name].double().sum()) for name, total in sums.items()}
    records = data.gather("prepare: mismatch", [float(count), *sums.values()])  # [all]
    total, *rest = [math.fsum(column) for column in zip(*records, strict=True)]
    return with_ess({name: value / total for name, value in zip(sums, rest, strict=True)}) if total else {}


def with_ess(metrics: Metrics) -> Metrics:
    """Replace the mean square of the weights by the effective sample size."""
    if SQUARE not in metrics:
        return metrics
    metrics = dict(metrics)
    return metrics | {ESS: effective_share(metrics["train_infer/ratio/mean"], metrics.pop(SQUARE))}


class MismatchMonitor:
    """Monitor that warns, or ends the run, if a step breaks `algorithm.bounds`."""

    def __init__(self, bounds: BoundsConfig, world: World) -> None:
        self._bounds, self._world = bounds, world
        self._outside: set[str] = set()

    @property
    def stops(self) -> bool:
        """True if metrics outside the bounds end the run."""
        return self._bounds.on_breach == "stop"

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once when a metric leaves its bounds, or raise RunFailed."""
        outside = {key: f"step {step}: {text}" for key, text in self._bounds.outside(metrics).items()}
        if outside and self.stops:
            raise RunFailed("; ".join(outside.values()))
        for key, line in outside.items():
            if key not in self._outside and self._world.rank == 0:
                tell(f"warning: {line}")
        self._outside = set(outside)
