"""`Denoising`: the role of a diffusion model, whose micro-batches and losses are functions of its caller.

Every rank brings equally many items, since sharded weights are gathered in each forward; a rank with fewer adds items
of weight 0.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spmd_rl.model.diffusion import FlowModel
from spmd_rl.model.load import load_weights
from spmd_rl.train.accumulate import AdapterOff, BaseRole
from spmd_rl.train.base import ForwardArgs, Metrics, MicrobatchLoop
from spmd_rl.train.stored_model import Source, Stored

Item = TypeVar("Item")
Loss = Callable[[nn.Module, Item], tuple[Tensor, Mapping[str, float | Tensor]]]
"""Function (denoiser, item) -> (loss, sums). The step's loss is the sum over items and ranks. `sums` has `num_tokens`,
by which the other sums are divided."""


class Denoising(BaseRole):
    """The policy of a diffusion model, or its frozen reference."""

    sync_steps: int | None = None
    """None: a reference keeps its weights."""

    def compute(
        self, name: str, items: Sequence[Item], function: Callable[[nn.Module, Item], Tensor], is_base: bool = False
    ) -> list[Tensor]:
        """[all] Return `function(denoiser, item)` for each item, without gradient. is_base: with adapters off."""
        found: list[Tensor] = []

        def finish(i: int, item: Item, outputs: tuple[nn.Module]) -> Tensor:
            found.append(function(outputs[0], item))
            return found[-1]

        self._run(name, items, finish, ForwardArgs(is_base=is_base), is_trained=False)  # [all]
        return found

    def update(self, items: Sequence[Item], loss: Loss) -> Metrics:
        """[all] Run one optimizer step on the sum of the losses of all ranks' items; see `BaseRole.optimize`."""
        sums: dict[str, Any] = defaultdict(float)

        def finish(i: int, item: Item, outputs: tuple[nn.Module]) -> Tensor:
            total, quantities = loss(outputs[0], item)
            for key, value in {"loss": total.detach(), **quantities}.items():
                sums[key] = sums[key] + value
            return total

        self._run("update", items, finish, ForwardArgs(), is_trained=True)  # [all]
        return self.conclude({key: float(value) for key, value in sums.items()}, len(items))  # [all]

    def _run(
        self, name: str, items: Sequence[Any], finish: Callable[..., Tensor], args: ForwardArgs, is_trained: bool
    ) -> None:
        with torch.set_grad_enabled(is_trained):
            loop = MicrobatchLoop(
                name=name, count=len(items), is_trained=is_trained, args=args, select=items.__getitem__, finish=finish
            )
            self.model.run(loop)  # [all]


class BaseDenoising(AdapterOff):
    """A frozen reference that is the policy with its adapters off, without a second model."""

    def compute(self, name: str, items: Sequence[Item], function: Callable[[nn.Module, Item], Tensor]) -> list[Tensor]:
        """[all] Return what `Denoising.compute` does, with adapters off."""
        return self.policy.compute(name, items, function, is_base=True)


def denoiser_source(flow: FlowModel) -> Source:
    """Return a source of the model's denoiser: on the meta device, each rank reads its own shards."""

    def source(role: Any, dtype: torch.dtype, on_progress: Callable[[], object]) -> Stored:
        files = flow.files()
        load = partial(load_weights, files=files, on_progress=on_progress)
        return Stored(flow.build(dtype), load, lambda: files.bytes_read, None, files)

    return source
