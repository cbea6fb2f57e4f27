"""The policy and the reference of a diffusion model on `FSDP2Model`: its output is the module itself, and `build`."""

from typing import Any

import torch
from torch import nn

from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout
from spmd_rl.train.base import ForwardArgs
from spmd_rl.train.denoising import Denoising
from spmd_rl.train.fsdp2.deterministic import fix_workspace
from spmd_rl.train.fsdp2.model import FSDP2Model
from spmd_rl.train.stored_model import Source


class FSDP2Denoiser(FSDP2Model):
    """A diffusion model's transformer; a micro-batch calls it as often as it likes."""

    size_of = staticmethod(lambda model: model.size)

    def outputs(self, micro: Any, args: ForwardArgs) -> tuple[nn.Module, ...]:
        """Return the module itself, see `Denoising`."""
        return (self.module,)


def build(role: RoleConfig, layout: Layout, source: Source) -> Denoising:
    """[all] Build the role on FSDP2; see `backend.build`."""
    if role.train.deterministic:
        fix_workspace()
    stored = source(role, getattr(torch, role.held_dtype), layout.world.progress)
    dtype = getattr(torch, role.dtype)
    made = FSDP2Denoiser(stored.model, layout, role.train, dtype, role.optimizer, stored.load)
    layout.world.journal.note("loaded", role=role.name, bytes=stored.num_bytes())
    return Denoising(made, layout, role)
