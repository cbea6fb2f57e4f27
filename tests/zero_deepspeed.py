"""`tests/zero.py` with DeepSpeed's ZeRO-1: its own reduction, clipping, step and state."""

from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state

from spmd_rl.config.backends import Backend
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout
from spmd_rl.train.accumulate import Policy
from spmd_rl.train.state import Shard
from tests import zero

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1, "overlap_comm": False},
}


class DeepSpeedZero(zero.Zero):
    """See `train.base.ShardedModel`; DeepSpeed averages gradients, which are to be sums over global weights."""

    def start(self, own: dict[str, Any]) -> None:
        """See `Zero`."""
        with self.layout.world.journal.slow(900.0):  # it compiles an extension where none is in its cache
            deepspeed.init_distributed(dist_backend="gloo")
        config = CONFIG | {"gradient_clipping": self.own.max_grad_norm}
        adamw = torch.optim.AdamW(self.module.parameters(), **own)
        started = deepspeed.initialize(model=self.module, optimizer=adamw, config=config, dist_init_required=False)
        self.forward, self.optimizer, self.copies = started[0], started[1], {}

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """See `Zero`."""
        self.forward.set_gradient_accumulation_boundary(is_last)
        self.forward.backward(loss * self.layout.world.size)
        if not is_last:
            self.forward.step()  # counts the micro-batch, and changes nothing

    def grad_square(self) -> float:
        """See `ShardedModel`."""
        norm = float(self.optimizer.scaled_global_norm())  # [all]
        return norm**2 if self.layout.world.rank == 0 else 0.0

    def step(self, lr: float, norm: float | None) -> None:
        """See `ShardedModel`."""
        if norm is None:
            self.optimizer.zero_grad()
            return
        self.optimizer.param_groups[0]["lr"] = lr
        self.forward.step()
        self.steps += 1

    def moments(self, p: torch.nn.Parameter) -> dict[str, torch.Tensor | None]:
        """Its own state is in flat pieces: whole copies, which `loaded` puts back; the first rank writes them."""
        # [all] zeros before the first step, which makes them
        held = {key: safe_get_full_optimizer_state(p, key) if self.has_moments() else None for key in zero.MOMENTS}
        self.copies[p] = {key: torch.zeros_like(p) if found is None else found.clone() for key, found in held.items()}
        return self.copies[p]

    def state(self) -> list[Shard]:
        """See `ShardedModel`."""
        return [shard._replace(is_mine=self.layout.world.rank == 0) for shard in super().state()]

    def loaded(self) -> None:
        """See `ShardedModel`."""
        for p, moments in self.copies.items():
            safe_set_full_fp32_param(p, p.detach().clone())
            for key, moment in moments.items():
                safe_set_full_optimizer_state(p, moment, key)
        for held in self.optimizer.optimizer.state.values():
            held["step"].copy_(self.steps)

    def has_moments(self) -> bool:
        """Whether AdamW has made them."""
        return any(zero.MOMENTS[0] in held for held in self.optimizer.optimizer.state.values())


def build(role: RoleConfig, layout: Layout, source: Any) -> Policy:
    """[all] See `Backend.build`."""
    return Policy(DeepSpeedZero(zero.filled(role, layout, source), layout, role), layout, role)


BACKEND = Backend(build=build, refuse=zero.refuse)
