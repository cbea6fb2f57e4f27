"""AdamW over sharded parameters, with clipping by the global norm and state that exists from the start.

It works on this rank's shards as plain tensors, so that parameters on different meshes need no care. Not supported:
other optimizers.
"""

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from spmd_rl.config.schema import CriticConfig, PolicyConfig
from spmd_rl.distributed import Layout
from spmd_rl.train.fsdp2.shard import local
from spmd_rl.train.fsdp2.tensor_parallel import complete_gradients, sharded_dim

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW on a model's trainable parameters; settings from `policy` or `critic`."""

    def __init__(
        self,
        model: nn.Module,
        settings: PolicyConfig | CriticConfig,
        layout: Layout,
        dtype: torch.dtype,
        partial: frozenset[str] = frozenset(),
    ) -> None:
        """`dtype`: the compute dtype. `partial`: names of parameters as in `tensor_parallel.parallelize`."""
        self._layout, self._dtype, self._partial = layout, dtype, partial
        self._max_norm = settings.max_grad_norm
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shards = {name: local(p).detach() for name, p in self._parameters.items()}
        self._moments = {f"{name}.{m}": torch.zeros_like(p) for name, p in self._parameters.items() for m in MOMENTS}
        self._adamw = AdamW(
            self._shards.values(),
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for name, shard in self._shards.items():  # torch makes it in the first step: too late for a checkpoint before
            moments = {moment: local(self._moments[f"{name}.{moment}"]) for moment in MOMENTS}
            self._adamw.state[shard] = {"step": torch.zeros((), device=shard.device), **moments}

    def local_grad_square(self) -> float:
        """[all] This rank's term of the squared gradient norm, in float64: the sum over all ranks counts each once."""
        grads = self._local_grads()
        replicated = {name: grad for name, grad in grads.items() if sharded_dim(self._parameters[name]) is None}
        if self._layout.size("tp") > 1:
            complete_gradients(replicated, self._partial, self._layout)
        counted = [grad for name, grad in grads.items() if self._counts_here(name)]
        return float(torch.stack(torch._foreach_norm(counted)).double().square().sum()) if counted else 0.0

    def step(self, lr: float, norm: float) -> int:
        """Clip the gradients, whose global norm is `norm`, and update at learning rate `lr`.

        Returns how many of this rank's weights change in the compute dtype, which is how the engine gets them: summed
        over all ranks, each counts once. 0 where that is the masters' own dtype.
        """
        before = [self._rounded(shard) for shard in self._shards.values()]
        grads = self._local_grads()
        if norm > self._max_norm:
            torch._foreach_mul_(list(grads.values()), self._max_norm / norm)
        for name, shard in self._shards.items():
            shard.grad = grads.get(name)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        pairs = zip(self._shards.items(), before, strict=True)
        return sum(int((self._rounded(shard) != old).sum()) for (name, shard), old in pairs if self._counts_here(name))

    def _rounded(self, shard: Tensor) -> Tensor:
        """The weights in the compute dtype; empty if that is their own."""
        return shard.to(self._dtype) if self._dtype.itemsize < shard.dtype.itemsize else shard[:0]

    def _counts_here(self, name: str) -> bool:
        """Whether a parameter's elements on this rank count in sums over all ranks: each counts once."""
        return self._layout.data.is_leader or sharded_dim(self._parameters[name]) is not None

    def zero_grad(self) -> None:
        """Free the gradients."""
        for tensor in (*self._parameters.values(), *self._shards.values()):
            tensor.grad = None

    def _local_grads(self) -> dict[str, Tensor]:
        return {name: local(p.grad) for name, p in self._parameters.items() if p.grad is not None}

    def state_dict(self) -> dict[str, Tensor]:
        """Sharded tensors `<parameter>.exp_avg` and `.exp_avg_sq`, and one `step`, which all parameters share."""
        return {"step": next(iter(self._adamw.state.values()))["step"], **self._moments}

    def load_step(self, state: dict[str, Tensor]) -> None:
        """Give every parameter its own copy of the step; the moments are loaded in place."""
        for own in self._adamw.state.values():
            own["step"].copy_(state["step"])

    def moments(self) -> list[Tensor]:
        """The live tensors of the state that are as large as the parameters."""
        return list(self._moments.values())
