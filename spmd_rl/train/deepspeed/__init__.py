"""Backend `deepspeed`: ZeRO 1, 2 and 3 over a role's ranks. Torch-free until it builds."""

from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.config.architectures import SEEING
from spmd_rl.config.backends import Backend
from spmd_rl.config.packages import installed, unsupported
from spmd_rl.config.sections.models import RoleConfig

ROUTING = ("router_replay", "router_aux_coef", "router_bias_update_speed")


def refuse(role: RoleConfig, model: dict[str, Any]) -> None:
    """Raise UserError for settings that are not supported."""
    train, kind = role.train, model.get("model_type")
    if kind in SEEING:
        raise UserError(
            f"{role.key}.name: train=deepspeed does not support the vision tower of {kind}; set train=fsdp2"
        )
    if train.offload_param and train.stage != 3:
        raise UserError(f"{role.key}.offload_param: needs {role.key}.stage=3, which alone shards parameters")
    if train.offload_param and not train.offload_optimizer and role.optimizer:
        raise UserError(f"{role.key}.offload_param: needs {role.key}.offload_optimizer=true")
    if train.activation_checkpointing == "selective" and train.stage == 3 and role.optimizer:
        # The first backward pass would fail: torch finds other operations in it than in the forward pass.
        raise UserError(f"{role.key}.activation_checkpointing: selective needs {role.key}.stage=1 or 2")
    for key in ROUTING:
        if getattr(role.own, key, None):
            raise UserError(
                f"{role.name}.{key}: not supported by train=deepspeed; must be {type(getattr(role.own, key))()}"
            )
    if role.lora.rank and role.lora.dora:
        raise UserError(f"{role.section or role.name}.lora.dora: not supported by train=deepspeed; must be False")
    out = unsupported("deepspeed")
    if out or installed("deepspeed") is None:
        found = f"DeepSpeed {out[0]} is not {out[1]}" if out else "DeepSpeed is not installed here"
        raise UserError(f"{role.key}.name=deepspeed: {found}; pip install 'spmd-rl[deepspeed]', or set train=fsdp2")


def build(role: RoleConfig, layout: Any, source: Any) -> Any:
    """[all] Build the role on this backend, see `Backend.build`."""
    from spmd_rl.train.deepspeed.model import build

    return build(role, layout, source)


BACKEND = Backend(
    build=build,
    settings=("activation_checkpointing", "stage", "offload_optimizer", "offload_param"),
    adapters=True,
    package="deepspeed",
    unplanned=("offload_optimizer", "offload_param"),
    refuse=refuse,
)
