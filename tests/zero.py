"""ZeRO-1 as a backend: every rank has all weights, and the optimizer's state of some.

    monkeypatch.setitem(BACKENDS, "zero", "tests.zero")

It is what one more backend costs: a package with a `BACKEND`, and a line in a table.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from spmd_rl.config.backends import Backend
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout
from spmd_rl.errors import UserError
from spmd_rl.model.logprobs import TokenHead, logit_factor
from spmd_rl.model.size import ModelSize
from spmd_rl.model.stored import stored_parts
from spmd_rl.train.accumulate import Policy, alone, walk
from spmd_rl.train.base import Pass
from spmd_rl.train.row import aim, filled_up, row_of
from spmd_rl.train.state import MODEL, OPTIMIZER, Shard, shards_of
from spmd_rl.train.stored_model import materialize

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero:
    """See `train.base.ShardedModel`; `ZeroRedundancyOptimizer` of torch."""

    def __init__(self, module: torch.nn.Module, layout: Layout, role: RoleConfig) -> None:
        config, self.layout, self.own = module.config, layout, role.own
        self.hidden_size, self.size, self.parts = config.hidden_size, ModelSize.of(module), stored_parts(module)
        module.set_output_embeddings(TokenHead(module.get_output_embeddings(), logit_factor(config)))
        self.module, self.named = module, dict(module.named_parameters())
        self.steps, self.is_last = torch.zeros(()), False
        own = {"lr": self.own.lr, "betas": self.own.betas, "eps": self.own.eps, "weight_decay": self.own.weight_decay}
        self.start(own)

    def start(self, own: dict[str, Any]) -> None:
        self.forward = self.module
        self.optimizer = ZeroRedundancyOptimizer(self.named.values(), torch.optim.AdamW, **own)
        for p in (p for group in self.optimizer.optim.param_groups for p in group["params"]):
            self.optimizer.optim.state[p] = {"step": torch.zeros(())} | {key: torch.zeros_like(p) for key in MOMENTS}

    def run(self, work: Pass) -> None:
        losses: list[torch.Tensor] = []

        def forward(step) -> None:
            micro = work.select(step.microbatch)
            row = row_of(micro, self.layout.world.device, torch.float32)
            aim(self.module.get_output_embeddings(), micro, row, work.ask.temperature, self.layout.world.device)
            tokens = {"input_ids": row.token_ids[None], "position_ids": row.position_ids[None], "packing": row.packing}
            out = self.forward(**tokens, use_cache=False, logits_to_keep=filled_up(row.keep)).logits[0]
            losses.append(work.finish(step.microbatch, micro, out[: len(row.keep)].unbind(-1)))

        walk(
            work,
            self.layout,
            alone(work),
            forward,
            lambda s: self.backward(losses.pop(), s.microbatch == work.count - 1),
        )

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()
        for p in self.named.values() if is_last else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)

    def grad_square(self) -> float:
        total = sum(float(p.grad.double().square().sum()) for p in self.named.values())
        return total if self.layout.world.rank == 0 else 0.0  # the same on all ranks

    def step(self, lr: float, norm: float | None) -> None:
        if norm is not None:
            torch._foreach_mul_([p.grad for p in self.named.values()], min(1.0, self.own.max_grad_norm / norm))
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
            self.steps += 1
        self.module.zero_grad()

    def metrics(self) -> dict[str, float]:
        return {}

    def weights(self):
        for name, p in self.named.items():
            yield from ((part.name, part.of(p.detach())) for part in self.parts[name])

    def moments(self, p: torch.nn.Parameter) -> dict[str, torch.Tensor | None]:
        """What this rank keeps of a parameter, or nothing."""
        held = self.optimizer.optim.state.get(p, {})
        return {key: held.get(key) for key in MOMENTS}

    def state(self) -> list[Shard]:
        is_first = self.layout.world.rank == 0
        found = [Shard(f"{OPTIMIZER}step", (), (), self.steps, is_first)]
        for name, p in self.named.items():
            own = tuple(slice(0, size) for size in p.shape)
            found += shards_of(MODEL, p.detach(), own, self.parts[name], is_first)
            for key, moment in self.moments(p).items():
                found += shards_of(f"{OPTIMIZER}{key}/", moment, own, self.parts[name], True)
        return found

    def loaded(self) -> None:
        for held in self.optimizer.optim.state.values():
            held["step"].copy_(self.steps)

    def wake(self) -> None:
        pass

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        self.module = torch.nn.Module()


def refuse(role: RoleConfig, model: dict[str, Any]) -> None:
    if role.name != "policy" or math.prod(role.train.axes.values()) > 1:
        raise UserError(f"{role.key}.name: zero trains a policy on data shards alone")


def filled(role: RoleConfig, layout: Layout, source: Any) -> torch.nn.Module:
    """The module with all of its weights."""
    module, load, _ = source(role.model, torch.float32, role.trust_remote_code, layout.world.progress)
    if load is not None:
        materialize(module, layout.world.device)
        load(module)
    return module


def build(role: RoleConfig, layout: Layout, source: Any) -> Policy:
    """[all] See `Backend.build`."""
    return Policy(Zero(filled(role, layout, source), layout, role), layout, role)


BACKEND = Backend(build=build, refuse=refuse)
