"""`GatedAdamW`: the optimizer that DeepSpeed steps, while we clip and decide whether to step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from spmd_rl.config.sections.models import TrainedModelConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class GatedAdamW(AdamW):
    """AdamW over the flat float32 shards with which DeepSpeed replaces the parameters.

    DeepSpeed computes the norm, clips and steps in one call, and masks a norm that is not finite. Here it only supplies
    gradients: `open` sets their factor, and without `open` a step changes nothing.
    """

    def __init__(self, parameters: Iterable[Tensor], own: TrainedModelConfig) -> None:
        """Take the settings of `policy` or `critic`."""
        betas = own.betas[0], own.betas[1]
        super().__init__(parameters, lr=own.lr, betas=betas, eps=own.eps, weight_decay=own.weight_decay, fused=True)
        self._scale: float | None = None

    def begin(self, shards: Iterable[Tensor]) -> None:
        """Create the state of the flat shards, which must exist before the first step so that a checkpoint can be
        loaded."""
        for shard in shards:
            zeros = {name: torch.zeros_like(shard, requires_grad=False) for name in MOMENTS}
            self.state[shard] = {"step": torch.zeros((), device=shard.device), **zeros}

    def open(self, lr: float, scale: float | None) -> None:
        """Let DeepSpeed's next call update at this rate with gradients times `scale`; None: it changes nothing."""
        self._scale = scale
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the shards; DeepSpeed calls this once, or for some shards at a time."""
        if self._scale is None:
            return
        if self._scale < 1:
            torch._foreach_mul_([p.grad for group in self.param_groups for p in group["params"]], self._scale)
        super().step(closure)
