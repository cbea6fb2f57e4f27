"""How far the samples of a step are from the policy that trains on them, and the bounds of that: `algorithm.bounds`.

found = measure(batches, level, data)       # [all] before the update, where the trainer's logprobs are known
watch.check(step, found | {"rollout/lag/max": 2.0})
"""

import math
from collections.abc import Mapping, Sequence

from spmd_rl.algo.correction import effective_share, mismatch
from spmd_rl.batch import Batch
from spmd_rl.config.sections.algorithm import BoundsConfig
from spmd_rl.distributed import DataShard, World
from spmd_rl.errors import RunFailed, tell
from spmd_rl.learn.policy_loss import tokens_of
from spmd_rl.train.base import Metrics

SQUARE = "train_infer/ratio_square/mean"
ESS = "train_infer/ess"
BOUNDS = {
    "max_abs_diff": ("train_infer/abs_diff/mean", "above"),
    "min_ess": (ESS, "below"),
    "max_lag": ("rollout/lag/max", "above"),
}
"""Key of `algorithm.bounds`: the metric, and on which side of the bound it is outside."""


def measure(batches: Sequence[Batch], level: str, data: DataShard) -> Metrics:
    """[all] The means over the sampled tokens of all data shards and mini-batches; equal on all ranks.

    The batches have `old_logprobs`. Without any token there are no metrics.
    """
    count, sums = 0, dict.fromkeys(("train_infer/abs_diff/mean", "train_infer/ratio/mean", SQUARE), 0.0)
    for batch in batches:
        assert batch.old_logprobs is not None
        old = batch.old_logprobs[batch.sampled.index]
        found = mismatch(tokens_of(batch, old, old)[0], level)
        count += len(old)
        sums = {name: total + float(found[name].double().sum()) for name, total in sums.items()}
    records = data.gather("prepare: mismatch", [float(count), *sums.values()])  # [all]
    total, *rest = [math.fsum(column) for column in zip(*records, strict=True)]
    return with_ess({name: value / total for name, value in zip(sums, rest, strict=True)}) if total else {}


def with_ess(metrics: Metrics) -> Metrics:
    """The metrics with the effective sample size in the place of the mean square that it is computed from."""
    if SQUARE not in metrics:
        return metrics
    metrics = dict(metrics)
    return metrics | {ESS: effective_share(metrics["train_infer/ratio/mean"], metrics.pop(SQUARE))}


class Watch:
    """Warns, or ends the run, where a step is outside of the bounds."""

    def __init__(self, bounds: BoundsConfig, world: World) -> None:
        self._bounds, self._world = bounds, world
        self._outside: set[str] = set()
        """Bounds that the last step has broken."""

    @property
    def stops(self) -> bool:
        """Whether the run ends before an update outside of the bounds."""
        return self._bounds.on_breach == "stop"

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of what was inside in the step before; RunFailed if told to stop. `metrics` are equal on all ranks."""
        outside = {}
        for key, (name, side) in BOUNDS.items():
            bound, value = getattr(self._bounds, key), metrics.get(name)
            if bound is None or value is None:
                continue
            inside = value <= bound if side == "above" else value >= bound
            if not inside:  # a NaN is not
                outside[key] = f"step {step}: {name} is {value:.4g}, {side} algorithm.bounds.{key}={bound:g}"
        if outside and self.stops:
            raise RunFailed("; ".join(outside.values()))
        for key, line in outside.items():
            if key not in self._outside and self._world.rank == 0:
                tell(f"warning: {line}")
        self._outside = set(outside)
