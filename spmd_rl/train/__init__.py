"""The training wing: roles (policy, reference) built from the settings, each behind `base.TrainBackend`."""

from typing import TYPE_CHECKING

import torch

from spmd_rl.config.schema import RlvrConfig
from spmd_rl.dist import World
from spmd_rl.errors import UserError
from spmd_rl.model.build import build_model
from spmd_rl.train.base import TrainBackend

if TYPE_CHECKING:
    from spmd_rl.train.fsdp2 import FSDP2Backend

BACKENDS = ("fsdp2",)


def build_roles(cfg: RlvrConfig, world: World) -> tuple[TrainBackend, TrainBackend | None]:
    """[all] The policy, and its frozen reference where `algorithm.kl_coef` > 0. UserError if it does not load."""
    if cfg.train.name not in BACKENDS:
        raise UserError(f"train.name={cfg.train.name!r} is none of {', '.join(BACKENDS)}")
    policy = _build_fsdp2(cfg, world, cfg.policy.model, cfg.policy.dtype, trained=True)
    if cfg.algorithm.kl_coef <= 0:
        return policy, None
    model, dtype = cfg.reference.model or cfg.policy.model, cfg.reference.dtype or cfg.policy.dtype
    return policy, _build_fsdp2(cfg, world, model, dtype, trained=False)


def _build_fsdp2(cfg: RlvrConfig, world: World, path: str, dtype: str, trained: bool) -> "FSDP2Backend":
    from spmd_rl.train.fsdp2 import FSDP2Backend

    model = build_model(path, torch.float32, "cpu", cfg.policy.trust_remote_code)
    policy, total = (cfg.policy, cfg.steps * cfg.train.updates_per_step) if trained else (None, 1)
    return FSDP2Backend(model, world, cfg.train, getattr(torch, dtype), policy, total)
