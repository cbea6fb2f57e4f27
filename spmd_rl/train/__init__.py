"""The training wing: policy, reference and critic, each built from its own settings, behind the Protocols of `base`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.distributed import Layout, World
from spmd_rl.model.build import build_model, build_on_meta, model_directory
from spmd_rl.model.load import WeightFiles, load_weights, mismatch
from spmd_rl.train.base import CriticBackend, Role, TrainBackend
from spmd_rl.train.packed_check import check_packing


class Roles(NamedTuple):
    """Who takes part in a run."""

    policy: TrainBackend
    reference: TrainBackend | None = None
    """Frozen; None where the algorithm has no KL penalty."""
    critic: CriticBackend | None = None
    """None where the algorithm reads no values."""

    @property
    def trained(self) -> dict[str, Role]:
        """By name, those whose weights a checkpoint must hold."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})


def build_roles(roles: Sequence[RoleConfig], world: World) -> Roles:
    """[all] The policy, and what the algorithm wants beside it. UserError if a model does not load, fit, or pack."""
    built = {role.name: build_role(role, world) for role in roles}  # [all]
    for role in roles:
        check_packing(f"{role.name}.model: {role.model}", built[role.name], getattr(torch, role.dtype))  # [all]
    return Roles(built["policy"], built.get("reference"), built.get("critic"))


class Stored(NamedTuple):
    """A model before it is sharded."""

    model: torch.nn.Module
    load: Callable[..., None] | None
    """Fills this rank's shards; None of a model that is whole."""
    num_bytes: Callable[[], int]
    """What has been read so far."""


def stored_model(path: str, dtype: torch.dtype, remote_code: bool, on_progress: Callable[[], object]) -> Stored:
    """The model of a directory or a name of the hub; on the meta device, where its shards can be read one by one."""
    folder = model_directory(path)
    model, files = build_on_meta(folder, dtype, remote_code), WeightFiles(folder)
    load = partial(load_weights, files=files, on_progress=on_progress)
    if mismatch(model, files):  # transformers renames and merges some weights as it loads them: experts, for one
        model, load = build_model(folder, dtype, "cpu", remote_code), None
    return Stored(model, load, lambda: files.bytes_read)


def build_role(role: RoleConfig, world: World, source: Callable[..., Stored] = stored_model) -> Any:
    """[all] The role over `world`. source: gives the model, called like `stored_model`.

    The journal's line `loaded` counts the bytes that this rank has read.
    """
    layout = Layout(world, **role.train.axes, key=role.key)  # [all]
    held_dtype = getattr(torch, role.dtype) if role.name == "reference" else torch.float32
    found = source(role.model, held_dtype, role.trust_remote_code, world.progress)
    built = BACKENDS[role.train.name](role, found.model, found.load, layout)
    world.journal.note("loaded", role=role.name, bytes=found.num_bytes())
    return built


def _build_fsdp2(role: RoleConfig, model: torch.nn.Module, load: Callable[..., None] | None, layout: Layout) -> Role:
    from spmd_rl.train.fsdp2 import FSDP2Backend, FSDP2Critic, with_value_head

    train, dtype, schedule = role.train, getattr(torch, role.dtype), (role.own, role.total_updates)
    if role.name == "reference":
        return FSDP2Backend(model, layout, train, dtype, load=load)
    if role.name == "policy":
        return FSDP2Backend(model, layout, train, dtype, *schedule, load)
    head = with_value_head(model).get_output_embeddings()
    fresh = {key for key, p in model.named_parameters() if any(p is value for value in head.parameters())}
    return FSDP2Critic(model, layout, train, dtype, *schedule, load and partial(load, fresh=fresh))


BACKENDS = {"fsdp2": _build_fsdp2}
