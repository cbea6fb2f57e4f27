"""Training roles, each built from its own settings, behind the Protocols of `base`.

Torch-free until it builds, so that settings a backend refuses fail before torch is imported.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from spmd_rl.config.backends import backend
from spmd_rl.config.sections.models import EvaluatedModelConfig, RoleConfig

if TYPE_CHECKING:
    from spmd_rl.distributed import World
    from spmd_rl.train.base import CriticRole, PolicyRole, Role
    from spmd_rl.train.stored_model import Source


class Roles(NamedTuple):
    """Models of a run, one per role."""

    policy: "PolicyRole | None"
    """The trained policy; None for a reward model, which is a critic"""
    reference: "PolicyRole | None" = None
    """Frozen copy; None without a KL penalty"""
    critic: "CriticRole | None" = None
    """Model of values; None where the algorithm reads none"""
    teachers: "Mapping[str, PolicyRole]" = MappingProxyType({})
    """Frozen teachers by domain; '' is all other domains"""

    @property
    def trained(self) -> "dict[str, Role]":
        """Roles whose weights a checkpoint holds: also a reference that follows the policy."""
        follows = self.reference is not None and self.reference.sync_steps is not None
        roles = {"policy": self.policy, "reference": self.reference if follows else None, "critic": self.critic}
        return {name: role for name, role in roles.items() if role is not None}


def build_roles(roles: Sequence[RoleConfig], world: "World") -> Roles:
    """[all] Build all roles of a pipeline, the policy first. UserError if a model does not load, fit, or pack."""
    from spmd_rl.train.accumulate import AdapterOff

    own = [role for role in roles if not role.is_base_of(roles[0])]
    built = build_own(own, world)  # [all]
    built |= {role.name: AdapterOff(built[roles[0].name]) for role in roles if role not in own}
    teachers = {role.name.partition(".")[2]: built[role.name] for role in roles if role.kind == "teacher"}
    return Roles(built.get("policy"), built.get("reference"), built.get("critic"), teachers)


def build_own(roles: Sequence[RoleConfig], world: "World") -> dict[str, Any]:
    """[all] Build each role with a separate model, by name; see `build_roles`."""
    from spmd_rl.train.packed_check import check_packing

    built = {role.name: build_role(role, world) for role in roles}  # [all]
    for role in roles:
        check_packing(f"{role.model_key}: {role.model}", built[role.name], role.dtype)  # [all]
    return built


def build_role(role: RoleConfig, world: "World", source: "Source | None" = None) -> Any:
    """[all] Build a role. source: loads the model; by default `stored_model`, or `checkpoint_model`."""
    from spmd_rl.distributed import Layout
    from spmd_rl.train.stored_model import checkpoint_model, stored_model

    layout = Layout(world, **role.train.axes, key=role.key)  # [all]
    trained = role.own.checkpoint if isinstance(role.own, EvaluatedModelConfig) else None
    stored = partial(checkpoint_model, trained) if trained else stored_model
    return backend(role.train.name).build(role, layout, source or stored)  # [all]


def build_denoisers(roles: Sequence[RoleConfig], world: "World", source: "Source") -> Roles:
    """[all] Build a diffusion model's policy, and its reference if `roles` has one. source: loads the model."""
    from spmd_rl.train.denoising import BaseDenoising

    policy, *others = roles
    built = build_role(policy, world, source)  # [all]
    reference = None
    if others:
        is_base = others[0].is_base_of(policy)  # alike on all ranks
        reference = BaseDenoising(built) if is_base else build_role(others[0], world, source)  # [all]
    return Roles(built, reference)
