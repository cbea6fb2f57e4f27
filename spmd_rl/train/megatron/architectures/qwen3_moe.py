"""Qwen3-MoE: every layer is a mixture of experts."""

from typing import Any

from spmd_rl.train.megatron.architectures import llama
from spmd_rl.train.megatron.architectures.llama import LAYER, STORED
from spmd_rl.train.megatron.architectures.qwen3 import NORMS
from spmd_rl.train.megatron.mapping import Columns, Rule, Stacked, Whole

EXPERT, STORED_EXPERT = f"{LAYER}mlp.experts.local_experts.{{}}.", f"{STORED}mlp.experts.{{}}."
MIXTURE: dict[str, Rule] = {
    f"{LAYER}mlp.router.weight": Whole(f"{STORED}mlp.gate.weight"),
    f"{EXPERT}linear_fc1.weight": Stacked(f"{STORED_EXPERT}gate_proj.weight", f"{STORED_EXPERT}up_proj.weight"),
    f"{EXPERT}linear_fc2.weight": Columns(f"{STORED_EXPERT}down_proj.weight"),
}
NAMES = llama.AROUND | llama.ATTENTION | NORMS | MIXTURE


def options(config: Any) -> dict[str, Any]:
    """Return the `TransformerConfig` fields that differ from Llama's."""
    return {
        "qk_layernorm": True,
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }
