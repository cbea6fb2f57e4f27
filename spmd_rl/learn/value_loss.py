"""The token loss of the critic: the squared error of `algo`, and its setting."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from spmd_rl.algo.values import value_loss
from spmd_rl.batch import Batch
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn.binding import bind
from spmd_rl.train.base import ValueLoss


def bind_value_loss(settings: AlgorithmConfig) -> ValueLoss:
    """The `ValueLoss` that the settings describe."""
    return partial(_loss, error=bind(value_loss, settings))


def _loss(
    values: Tensor, batch: Batch, *, error: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """See `train.base.ValueLoss`."""
    assert batch.values is not None and batch.returns is not None
    old, returns = batch.values[batch.sampled.index], batch.returns[batch.sampled.index]
    loss, quantities = error(values, old, returns)
    return loss, quantities | {"critic/values/mean": old, "critic/returns/mean": returns}
