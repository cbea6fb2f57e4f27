"""Training: policy, reference, critic, each built from its own settings, behind the Protocols of `base`.

Torch-free until it builds: what a backend refuses (`config/backends.py`) is asked before torch is imported.
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
    """Who takes part in a run."""

    policy: "PolicyRole | None"
    """None where a reward model is trained, which is a critic."""
    reference: "PolicyRole | None" = None
    """Without an optimizer; None where the algorithm has no KL penalty."""
    critic: "CriticRole | None" = None
    """None where the algorithm reads no values."""
    teachers: "Mapping[str, PolicyRole]" = MappingProxyType({})
    """Frozen, by domain; '' is that of all others."""

    @property
    def trained(self) -> "dict[str, Role]":
        """By name, those whose weights a checkpoint must hold; the reference among them, if it follows the policy."""
        follows = self.reference is not None and self.reference.sync_steps is not None
        roles = {"policy": self.policy, "reference": self.reference if follows else None, "critic": self.critic}
        return {name: role for name, role in roles.items() if role is not None}


def build_roles(roles: Sequence[RoleConfig], world: "World") -> Roles:
    """[all] The policy, and what the pipeline wants beside it. UserError if a model does not load, fit, or pack."""
    from spmd_rl.train.adapter_off import AdapterOff

    own = [role for role in roles if not role.is_base_of(roles[0])]
    built = build_own(own, world)  # [all]
    built |= {role.name: AdapterOff(built[roles[0].name]) for role in roles if role not in own}
    teachers = {role.name.partition(".")[2]: built[role.name] for role in roles if role.kind == "teacher"}
    return Roles(built.get("policy"), built.get("reference"), built.get("critic"), teachers)


def build_own(roles: Sequence[RoleConfig], world: "World") -> dict[str, Any]:
    """[all] Each role by its name, with a model of its own. UserError as of `build_roles`."""
    from spmd_rl.train.packed_check import check_packing

    built = {role.name: build_role(role, world) for role in roles}  # [all]
    for role in roles:
        check_packing(f"{role.model_key}: {role.model}", built[role.name], role.dtype)  # [all]
    return built


def build_role(role: RoleConfig, world: "World", source: "Source | None" = None) -> Any:
    """[all] The role over `world`. source: gives the model; by default `stored_model`, or `checkpoint_model`."""
    from spmd_rl.distributed import Layout
    from spmd_rl.train.stored_model import checkpoint_model, stored_model

    layout = Layout(world, **role.train.axes, key=role.key)  # [all]
    trained = role.own.checkpoint if isinstance(role.own, EvaluatedModelConfig) else None
    stored = partial(checkpoint_model, trained) if trained else stored_model
    return backend(role.train.name).build(role, layout, source or stored)  # [all]
