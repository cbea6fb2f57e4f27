"""Mixtral: a mixture of experts in every layer."""

from typing import Any

from spmd_rl.train.megatron.architectures import llama
from spmd_rl.train.megatron.architectures.llama import LAYER, STORED
from spmd_rl.train.megatron.architectures.qwen3_moe import EXPERT
from spmd_rl.train.megatron.mapping import Columns, Rule, Stacked, Whole

STORED_EXPERT = f"{STORED}block_sparse_moe.experts.{{}}."
MIXTURE: dict[str, Rule] = {
    f"{LAYER}mlp.router.weight": Whole(f"{STORED}block_sparse_moe.gate.weight"),
    f"{EXPERT}linear_fc1.weight": Stacked(f"{STORED_EXPERT}w1.weight", f"{STORED_EXPERT}w3.weight"),
    f"{EXPERT}linear_fc2.weight": Columns(f"{STORED_EXPERT}w2.weight"),
}
NAMES = llama.AROUND | llama.ATTENTION | MIXTURE


def options(config: Any) -> dict[str, Any]:
    """Return the `TransformerConfig` fields that differ from Llama's."""
    return {
        "num_moe_experts": config.num_local_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size,
    }
