"""`build`: a role on Megatron-core."""

from importlib import import_module

import torch

from spmd_rl.base.errors import UserError
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout
from spmd_rl.train.accumulate import Critic, Policy
from spmd_rl.train.megatron import architectures
from spmd_rl.train.megatron.model import MegatronModel
from spmd_rl.train.megatron.value_head import rules_with
from spmd_rl.train.stored_model import Source


def build(role: RoleConfig, layout: Layout, source: Source) -> Policy | Critic:
    """[all] Build the role; the journal's `loaded` counts bytes read."""
    if role.train.vpp > 1 and role.train.pp == 2 and layout.world.device.type != "cpu":
        # The stage before and the stage after are one rank, and a device's messages have no tags (see `shim`)
        raise UserError(f"{layout.key}.vpp: two stages would mix up their messages on a device; must be 1")
    stored = source(role, getattr(torch, role.held_dtype), layout.world.progress)
    module, files = stored.model, stored.files
    architecture = import_module(f"{architectures.__name__}.{module.config.model_type}")
    rules, is_critic = architecture.NAMES, role.name == "critic"
    if is_critic:
        rules = rules_with(rules, files.head)
    model = MegatronModel(module, layout, role, files, rules, architecture.options(module.config))  # [all]
    layout.world.journal.note("loaded", role=role.name, bytes=files.bytes_read)
    return (Critic if is_critic else Policy)(model, layout, role)
