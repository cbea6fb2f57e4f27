"""The training wing: roles (policy, reference, critic) built from the settings, each behind a Protocol of `base`."""

from typing import NamedTuple

import torch

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.errors import UserError
from spmd_rl.model.build import build_model
from spmd_rl.train.base import CriticBackend, Role, TrainBackend

BACKENDS = ("fsdp2",)


class Roles(NamedTuple):
    """Who takes part in a run."""

    policy: TrainBackend
    reference: TrainBackend | None
    """Frozen; None where the algorithm has no KL penalty."""
    critic: CriticBackend | None
    """None where the algorithm reads no values."""

    @property
    def trained(self) -> dict[str, Role]:
        """By name, those whose weights a checkpoint must hold."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})


def build_roles(cfg: RlvrConfig, world: World) -> Roles:
    """[all] The policy, and what the algorithm wants beside it. UserError if a model does not load."""
    if cfg.train.name not in BACKENDS:
        raise UserError(f"train.name={cfg.train.name!r} is none of {', '.join(BACKENDS)}")
    return _build_fsdp2(cfg, world)


def _build_fsdp2(cfg: RlvrConfig, world: World) -> Roles:
    from spmd_rl.train.fsdp2 import FSDP2Backend, FSDP2Critic, with_value_head

    def load(path: str | None) -> torch.nn.Module:
        return build_model(path or cfg.policy.model, torch.float32, "cpu", cfg.policy.trust_remote_code)

    def dtype(name: str | None) -> torch.dtype:
        return getattr(torch, name or cfg.policy.dtype)

    updates, layout = cfg.train.updates_per_step, Layout(world, tp=cfg.train.tp)  # [all]
    total = max(0, cfg.steps - cfg.algorithm.critic_warmup) * updates
    policy = FSDP2Backend(load(None), layout, cfg.train, dtype(None), cfg.policy, total)
    reference = critic = None
    if cfg.algorithm.uses_reference:
        reference = FSDP2Backend(load(cfg.reference.model), layout, cfg.train, dtype(cfg.reference.dtype))
    if cfg.algorithm.uses_critic:
        model = with_value_head(load(cfg.critic.model))
        critic = FSDP2Critic(model, layout, cfg.train, dtype(cfg.critic.dtype), cfg.critic, cfg.steps * updates)
    return Roles(policy, reference, critic)
