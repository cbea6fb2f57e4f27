"""Backend `fsdp2`: `fully_shard`, and every axis of a layout. Torch-free until it builds."""

from typing import Any

from spmd_rl.base.errors import UserError
from spmd_rl.config.architectures import HYBRID, SCALES_HIDDEN_STATES, SEEING
from spmd_rl.config.backends import Backend
from spmd_rl.config.sections.models import OPTIMIZERS, RoleConfig


def refuse(role: RoleConfig, model: dict[str, Any]) -> None:
    """Raise UserError for settings that are not supported."""
    train = role.train
    if model.get("model_type") in SEEING:
        _refuse_with_pictures(role, model["model_type"])
    if train.compile and train.pp > 1:
        raise UserError(f"{role.key}.compile: not supported with pp > 1")
    kind, axis = model.get("model_type"), "cp" if train.cp > 1 else "compile" * train.compile
    if axis and kind in HYBRID:
        # A layer's state passes through all tokens.
        raise UserError(f"{role.key}.{axis}: not supported with {kind}, whose layers carry a state")
    # Each stage would scale its input again.
    if train.pp > 1 and kind in SCALES_HIDDEN_STATES:
        raise UserError(f"{role.key}.pp: {kind} scales its hidden states; must be 1")
    if role.dtype == "float16" and getattr(role.own, "router_aux_coef", 0):
        raise UserError(
            f"{role.section or role.name}.router_aux_coef: its gradient is not scaled in float16; must be 0"
        )
    if role.lora.rank:
        _refuse_with_adapters(role, f"{role.section or role.name}")


def _refuse_with_pictures(role: RoleConfig, kind: str) -> None:
    if axis := next((axis for axis in ("tp", "cp", "ep", "pp") if role.train.axes[axis] > 1), ""):
        raise UserError(f"{role.key}.{axis}: not supported with the vision tower of {kind}; must be 1")
    if role.train.compile:
        raise UserError(f"{role.key}.compile: not supported with the vision tower of {kind}")


def _refuse_with_adapters(role: RoleConfig, section: str) -> None:
    if role.train.compile:
        raise UserError(f"{role.key}.compile: not supported with {section}.lora")
    if role.own.optimizer != "adamw":
        raise UserError(
            f"{section}.optimizer: {role.own.optimizer} is not supported with {section}.lora; must be adamw"
        )
    if role.lora.dora and role.train.tp > 1:
        raise UserError(f"{section}.lora.dora: not supported with {role.key}.tp > 1")


def build(role: RoleConfig, layout: Any, source: Any) -> Any:
    """[all] Build the role on this backend, see `Backend.build`."""
    if role.is_denoiser:
        from spmd_rl.train.fsdp2.denoiser import build
    else:
        from spmd_rl.train.fsdp2.backend import build

    return build(role, layout, source)


BACKEND = Backend(
    build=build,
    axes=("tp", "cp", "ep", "pp", "vpp", "dp_replicate"),
    settings=("activation_checkpointing", "reshard_after_forward", "compile", "deterministic", "offload"),
    optimizers=OPTIMIZERS,
    adapters=True,
    dtypes=("bfloat16", "float32", "float16"),
    quantized_base=True,
    follows=True,
    refuse=refuse,
)
