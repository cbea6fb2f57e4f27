"""Backend `megatron`: Megatron-core behind Hugging Face names. Torch-free until it builds."""

from typing import Any
from warnings import catch_warnings, simplefilter

from spmd_rl.base.errors import UserError
from spmd_rl.config.backends import Backend
from spmd_rl.config.packages import installed, unsupported
from spmd_rl.config.sections.models import RoleConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
"""Supported model types, each a module of `architectures/`"""
LATENT = "deepseek_v3"
MIXTURES = ("qwen3_moe", "mixtral", LATENT)
BIASES = ("attention_bias", "mlp_bias")
"""Keys of `config.json` for biases without a mapping"""
GROUPS = {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
"""DeepSeek-V3's numbers of chosen experts, groups, and groups to choose from"""
IMPORT_SECONDS = 600.0
"""Limit without progress on the import, read by all ranks of a machine at once"""


def refuse(role: RoleConfig, model: dict[str, Any]) -> None:
    """Raise UserError for settings that are not supported."""
    train, kind = role.train, model.get("model_type")
    out = unsupported("megatron-core")
    if out or installed("megatron-core") is None:
        found = f"megatron-core {out[0]} is not {out[1]}" if out else "megatron-core is not installed here"
        raise UserError(f"{role.key}.name=megatron: {found}; pip install 'spmd-rl[megatron]', or set train=fsdp2")
    if kind is not None and kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{role.key}.name: train=megatron does not support {kind}; known: {known}. train=fsdp2 may")
    if train.activation_checkpointing == "selective":
        raise UserError(f"{role.key}.activation_checkpointing: train=megatron supports only full and none")
    for key, default in {"dropout": 0.0, "dora": False}.items():
        if role.lora.rank and getattr(role.lora, key) != default:
            raise UserError(
                f"{role.section or role.name}.lora.{key}: not supported by train=megatron; must be {default}"
            )
    if getattr(role.own, "router_aux_coef", 0.0) and kind is not None and kind not in MIXTURES:
        raise UserError(f"{role.name}.router_aux_coef: {kind} is not a mixture of experts; must be 0")
    if getattr(role.own, "router_bias_update_speed", 0.0) and kind not in (None, LATENT):
        raise UserError(f"{role.name}.router_bias_update_speed: the routers of {kind} have no biases; must be 0")
    _check_model(role, model)
    if kind == LATENT:
        _check_latent(role, model)


def _check_model(role: RoleConfig, model: dict[str, Any]) -> None:
    if (act := model.get("hidden_act", "silu")) != "silu":
        raise UserError(f"{role.key}.name: train=megatron does not support the activation {act} of this model")
    if biased := next((key for key in BIASES if model.get(key)), ""):
        raise UserError(f"{role.key}.name: train=megatron does not support the biases of this model: {biased}")
    heads = model.get("num_attention_heads")
    sizes = {"attention heads": heads, "key-value heads": model.get("num_key_value_heads", heads)}
    sizes["columns of the MLP"] = model.get("intermediate_size")
    if is_latent := model.get("model_type") == LATENT:
        sizes["columns of the shared experts"] = model.get("moe_intermediate_size")
    for what, size in sizes.items():
        if size and size % role.train.tp:
            raise UserError(f"{role.key}.tp: Megatron cannot divide {size} {what} among {role.train.tp} ranks")
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if (kind := rope.get("rope_type") or rope.get("type")) == "longrope" or (kind == "yarn" and not is_latent):
        raise UserError(f"{role.key}.name: train=megatron does not support rotary positions of the type {kind} yet")


def _check_latent(role: RoleConfig, model: dict[str, Any]) -> None:
    chosen, groups, of_groups = (model.get(key, n) for key, n in GROUPS.items())
    # Megatron scores a group by its best `chosen // of_groups` experts, transformers by its best two.
    limits = of_groups < groups and chosen // of_groups != 2
    odd = {
        "q_lora_rank": model.get("q_lora_rank", 1536) is None,
        "rope_interleave": not model.get("rope_interleave", True),
        "norm_topk_prob": not model.get("norm_topk_prob", True),
        "num_experts_per_tok": limits or chosen < 2,
    }
    if key := next((key for key, is_odd in odd.items() if is_odd), None):
        raise UserError(f"{role.key}.name: train=megatron does not support the {key} of this model: {model.get(key)}")


def build(role: RoleConfig, layout: Any, source: Any) -> Any:
    """[all] Build the role; `source` serves for sizes only."""
    with layout.world.journal.extend_timeout(IMPORT_SECONDS), catch_warnings():
        # Megatron warns of every optional package that it does not find.
        simplefilter("ignore")
        from spmd_rl.train.megatron.backend import build

    return build(role, layout, source)


BACKEND = Backend(
    build=build,
    axes=("tp", "cp", "ep", "pp", "vpp"),
    settings=("activation_checkpointing", "offload"),
    adapters=True,
    package="megatron-core",
    refuse=refuse,
)
