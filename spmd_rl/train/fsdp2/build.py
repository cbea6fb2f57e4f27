"""`build`: a role on FSDP2, from the files of a model directory."""

from functools import partial

import torch

from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout
from spmd_rl.train.base import Role
from spmd_rl.train.fsdp2.backend import fsdp2_policy
from spmd_rl.train.fsdp2.critic import fsdp2_critic, with_value_head
from spmd_rl.train.stored_model import Source


def build(role: RoleConfig, layout: Layout, source: Source) -> Role:
    """[all] See `Backend.build`. The journal's line `loaded` counts the bytes that this rank has read."""
    dtype, world = getattr(torch, role.dtype), layout.world
    model, load, num_bytes = source(
        role.model, dtype if role.name == "reference" else torch.float32, role.trust_remote_code, world.progress
    )
    if role.name == "reference":
        built: Role = fsdp2_policy(model, layout, role.train, dtype, load=load)
    elif role.name == "policy":
        built = fsdp2_policy(model, layout, role.train, dtype, role.own, role.total_updates, load)
    else:
        head = with_value_head(model).get_output_embeddings()
        fresh = {key for key, p in model.named_parameters() if any(p is value for value in head.parameters())}
        load = load and partial(load, fresh=fresh)
        built = fsdp2_critic(model, layout, role.train, dtype, role.own, role.total_updates, load)
    world.journal.note("loaded", role=role.name, bytes=num_bytes())
    return built
