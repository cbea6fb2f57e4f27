"""DeepSeek-V3: latent attention; mixtures with shared and biased experts after dense layers."""

from typing import Any

from spmd_rl.train.megatron.architectures import llama, qwen3_moe
from spmd_rl.train.megatron.architectures.llama import LAYER, STORED
from spmd_rl.train.megatron.mapping import Buffer, Columns, Rule, Stacked, Whole

OWN, THEIRS, SHARED = f"{LAYER}self_attention.", f"{STORED}self_attn.", "mlp.shared_experts."
ATTENTION: dict[str, Rule] = {
    f"{LAYER}input_layernorm.weight": Whole(f"{STORED}input_layernorm.weight"),
    f"{OWN}linear_q_down_proj.weight": Whole(f"{THEIRS}q_a_proj.weight"),
    f"{OWN}q_layernorm.weight": Whole(f"{THEIRS}q_a_layernorm.weight"),
    f"{OWN}linear_q_up_proj.weight": Stacked(f"{THEIRS}q_b_proj.weight"),
    f"{OWN}linear_kv_down_proj.weight": Whole(f"{THEIRS}kv_a_proj_with_mqa.weight"),
    f"{OWN}kv_layernorm.weight": Whole(f"{THEIRS}kv_a_layernorm.weight"),
    f"{OWN}linear_kv_up_proj.weight": Stacked(f"{THEIRS}kv_b_proj.weight"),
    f"{OWN}linear_proj.weight": Columns(f"{THEIRS}o_proj.weight"),
    f"{LAYER}pre_mlp_layernorm.weight": Whole(f"{STORED}post_attention_layernorm.weight"),
}
MIXTURE: dict[str, Rule] = {
    f"{LAYER}mlp.router.expert_bias": Buffer(f"{STORED}mlp.gate.e_score_correction_bias"),
    f"{LAYER}{SHARED}linear_fc1.weight": Stacked(*(f"{STORED}{SHARED}{x}_proj.weight" for x in ("gate", "up"))),
    f"{LAYER}{SHARED}linear_fc2.weight": Columns(f"{STORED}{SHARED}down_proj.weight"),
}
NAMES = llama.AROUND | ATTENTION | llama.MLP | qwen3_moe.MIXTURE | MIXTURE


def options(config: Any) -> dict[str, Any]:
    """Return the `TransformerConfig` fields that differ from Llama's."""
    rope = config.rope_parameters
    # Scaled rotary positions also scale attention, if the model says so.
    scales = rope["rope_type"] != "default"
    return {
        "qk_layernorm": True,
        "rope_type": "rope",
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rotary_scaling_factor": rope["factor"] if scales else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        "moe_layer_freq": [int(i >= config.first_k_dense_replace) for i in range(config.num_hidden_layers)],
        "num_moe_experts": config.n_routed_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }
