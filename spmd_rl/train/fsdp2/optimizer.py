"""AdamW over sharded parameters, with clipping by the global norm and state that exists from the start.

Left out: gradient norms across meshes of more than one axis, other optimizers.
"""

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from spmd_rl.config.schema import CriticConfig, PolicyConfig
from spmd_rl.train.fsdp2.shard import local

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW on a model's trainable parameters; settings from `policy` or `critic`."""

    def __init__(self, model: nn.Module, settings: PolicyConfig | CriticConfig) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._max_norm = settings.max_grad_norm
        self._adamw = AdamW(
            self._parameters.values(),
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for p in self._parameters.values():  # torch makes it in the first step: too late for a checkpoint before it
            moments = {moment: torch.zeros_like(p) for moment in MOMENTS}
            self._adamw.state[p] = {"step": torch.zeros((), device=p.device), **moments}

    def local_grad_square(self) -> float:
        """Sum of the squares of this rank's gradients, accumulated in float64 over tensors."""
        norms = torch._foreach_norm(self._local_grads())
        return float(torch.stack(norms).double().square().sum())

    def step(self, lr: float, norm: float) -> None:
        """Clip the gradients, whose global norm is `norm`, and update at learning rate `lr`."""
        if norm > self._max_norm:
            torch._foreach_mul_(self._local_grads(), self._max_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def zero_grad(self) -> None:
        """Free the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def _local_grads(self) -> list[Tensor]:
        return [local(p.grad) for p in self._parameters.values()]

    def state_dict(self) -> dict[str, Tensor]:
        """Sharded tensors `<parameter>.exp_avg` and `.exp_avg_sq`, and one `step`, which all parameters share."""
        state = self._adamw.state
        moments = {f"{name}.{m}": state[p][m] for name, p in self._parameters.items() for m in MOMENTS}
        return {"step": next(iter(state.values()))["step"], **moments}

    def load_step(self, state: dict[str, Tensor]) -> None:
        """Give every parameter its own copy of the step; the moments are loaded in place."""
        for p in self._parameters.values():
            self._adamw.state[p]["step"].copy_(state["step"])

    def moments(self) -> list[Tensor]:
        """The live tensors of the state that are as large as the parameters."""
        return [state[moment] for state in self._adamw.state.values() for moment in MOMENTS]
