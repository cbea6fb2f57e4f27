"""Repacking of weights that vLLM packs on the CPU and would not pack again on a reload."""

from torch import nn
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def repack_heads(model: nn.Module) -> None:
    """Refresh output heads from their tied embedding; no-op except on the CPU."""
    # A reload skips a layer without a stored name. On the CPU a head computes with a packed copy, which would keep old
    # weights.
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def unpack_experts(model: nn.Module) -> None:
    """Make the next reload pack the experts of a mixture again; no-op except on the CPU."""
    # vLLM packs only the first time, and would mistake reloaded plain weights for packed ones. Elsewhere unpacked
    # weights are copied in place, where captured graphs expect them.
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and module.w13_weight.device.type == "cpu":
            method.moe_kernel = None
