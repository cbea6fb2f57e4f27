"""AdamW, optionally with Muon, over sharded parameters, with state from the start.

AdamW works on local shards as plain tensors, so meshes may differ. Muon needs whole matrices, see `muon.py`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from spmd_rl.config.sections.models import TrainedModelConfig
from spmd_rl.distributed import Layout
from spmd_rl.model.load import local
from spmd_rl.train.fsdp2.muon import Muon
from spmd_rl.train.fsdp2.pipeline import Pipeline
from spmd_rl.train.fsdp2.tensor_parallel import complete_gradients, is_repeated

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)
"""State names in a checkpoint, as in torch"""
LARGE, SAMPLED = 2**15, 2**12
"""Size above which changed weights are sampled, and the least sample"""


def counts_once(name: str, parameter: Tensor, layout: Layout, pipeline: Pipeline, copy: int) -> bool:
    """Return True if a parameter's elements here count in sums over all ranks. copy: the one that counts."""
    if layout.rank("dp_replicate") != copy or not pipeline.counts_here(name):
        return False
    return layout.rank("tp") == 0 or not is_repeated(parameter)


class Optimizer:
    """Optimizer of a model's trainable parameters."""

    def __init__(
        self,
        model: nn.Module,
        settings: TrainedModelConfig,
        layout: Layout,
        dtype: torch.dtype,
        pipeline: Pipeline,
        matrices: Mapping[str, int],
    ) -> None:
        """dtype: of computation. matrices: whole-model parameters for Muon."""
        self._layout, self._dtype, self._pipeline, self._matrices = layout, dtype, pipeline, matrices
        self._max_norm = settings.max_grad_norm
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shards = {name: local(p).detach() for name, p in self._parameters.items()}
        self.rounds = any(dtype.itemsize < shard.dtype.itemsize for shard in self._shards.values())
        """True if the compute dtype is narrower than the masters', so that steps may leave weights unchanged"""
        others = {name: p for name, p in self._parameters.items() if name not in matrices}
        self._muon = Muon({n: p for n, p in self._parameters.items() if n in matrices}, matrices, layout, settings)
        self._moments = {f"{name}.{m}": torch.zeros_like(p) for name, p in others.items() for m in MOMENTS}
        # All parameters of a pipeline stage may be frozen, and torch refuses an empty list.
        self._adamw = AdamW(
            [self._shards[name] for name in others] or [torch.zeros(0)],
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        # torch creates the state in the first step, too late for a checkpoint before it.
        for name in others:
            shard, moments = self._shards[name], {m: local(self._moments[f"{name}.{m}"]) for m in MOMENTS}
            self._adamw.state[shard] = {"step": torch.zeros((), device=shard.device), **moments}
        self._steps = torch.zeros(())
        self._moments |= {f"{name}.{m}": buffer for name, buffer in self._muon.buffers.items() for m in MOMENTUM}

    @property
    def num_steps(self) -> int:
        """Steps taken, without skipped updates."""
        return int(self._steps)

    def counted_grads(self, factor: float = 1.0) -> dict[str, Tensor]:
        """[all] Return this rank's gradients by parameter; each element is on one rank.

        factor: multiplies them first, in place.
        """
        grads = self._local_grads()
        if factor != 1.0 and grads:
            torch._foreach_mul_(list(grads.values()), factor)
        # Before the norm: a tied weight's gradient is a sum over its two stages.
        self._pipeline.sum_tied(grads)
        repeated = {name: grad for name, grad in grads.items() if is_repeated(self._parameters[name])}
        if self._layout.size("tp") > 1:
            complete_gradients(repeated, self._layout)
        # Replicated gradients are equal on several ranks, and must enter the norm once.
        return {name: grad for name, grad in grads.items() if self.counts_here(name)}

    def step(self, lr: float, norm: float) -> float:
        """[all] Clip gradients of global norm `norm`, and update at `lr`.

        Returns the number of this rank's weights that change in the compute dtype, 0 unless `rounds`; ranks' numbers
        add up. Large parameters are estimated from at least `SAMPLED` elements.
        """
        before = {name: self._sample(shard) for name, shard in self._shards.items()} if self.rounds else {}
        grads = self._local_grads()
        if grads and norm > self._max_norm:
            torch._foreach_mul_(list(grads.values()), self._max_norm / norm)
        self._muon.step(lr)  # [all]
        for name, shard in self._shards.items():
            # AdamW steps plain local shards, which need plain local gradients.
            shard.grad = grads.get(name)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._steps += 1
        counted = [name for name, sample in before.items() if sample.numel() and self.counts_here(name)]
        shares = [(self._sample(self._shards[name]) != before[name]).float().mean() for name in counted]
        sizes = [self._shards[name].numel() for name in counted]
        found = torch.stack(shares).tolist() if shares else []
        return sum(size * share for size, share in zip(sizes, found, strict=True))

    def _sample(self, shard: Tensor) -> Tensor:
        stride = shard.numel() // SAMPLED if shard.numel() > LARGE else 1
        return shard.reshape(-1)[::stride].to(self._dtype)

    def counts_here(self, name: str, copy: int = 0) -> bool:
        """Return True if a parameter's elements here count in sums over ranks, once, on copy `copy`."""
        return counts_once(name, self._parameters[name], self._layout, self._pipeline, copy)

    def zero_grad(self) -> None:
        """Free the gradients of parameters."""
        for tensor in (*self._parameters.values(), *self._shards.values()):
            tensor.grad = None

    def _local_grads(self) -> dict[str, Tensor]:
        return {name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def state_dict(self) -> dict[str, Tensor]:
        """Return sharded tensors `<parameter>.exp_avg` etc., and AdamW's `step`."""
        return {"step": self._steps} | self._moments

    def on_state_loaded(self) -> None:
        """Restore AdamW's step counts after `state_dict` was overwritten."""
        for own in self._adamw.state.values():
            own["step"].copy_(self._steps)

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return names of a trained parameter's optimizer state."""
        return MOMENTUM if name in self._matrices else MOMENTS

    def moments(self) -> list[Tensor]:
        """Return live state tensors of the parameters' size."""
        return list(self._moments.values())
