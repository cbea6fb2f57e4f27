"""`build`: a role on Megatron-core."""

from importlib import import_module

import torch

from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout
from spmd_rl.errors import UserError
from spmd_rl.model.build import build_on_meta, model_directory
from spmd_rl.model.load import WeightFiles
from spmd_rl.train.accumulate import Policy
from spmd_rl.train.megatron import architectures
from spmd_rl.train.megatron.model import MegatronModel


def build(role: RoleConfig, layout: Layout) -> Policy:
    """[all] See `Backend.build`. The journal's line `loaded` counts the bytes that this rank has read."""
    if role.train.vpp > 1 and role.train.pp == 2 and layout.world.device.type == "cpu":
        # the stage before and the stage after are one rank, and gloo pairs messages by their order alone
        raise UserError(f"{layout.key}.vpp: with two stages on CPU Megatron's gradients are wrong; must be 1")
    folder = model_directory(role.model)
    module, files = build_on_meta(folder, torch.float32, role.trust_remote_code), WeightFiles(folder)
    architecture = import_module(f"{architectures.__name__}.{module.config.model_type}")
    model = MegatronModel(module, layout, role, files, architecture)  # [all]
    layout.world.journal.note("loaded", role=role.name, bytes=files.bytes_read)
    return Policy(model, layout, role)
