"""Repacking of weights that vLLM packs on the CPU and would not pack again on a reload."""

from torch import nn
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def repack_heads(model: nn.Module) -> None:
    """Refresh output heads from their tied embedding: a reload skips a layer without a stored name.

    On the CPU a head computes with a packed copy, which would otherwise stay old. No-op elsewhere.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def unpack_experts(model: nn.Module) -> None:
    """Make the next reload pack the experts of a mixture again: vLLM does so only the first time.

    On the CPU experts compute with packed weights, and would mistake reloaded plain ones for packed. No-op elsewhere:
    unpacked weights are copied in place, where captured graphs expect them.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and module.w13_weight.device.type == "cpu":
            method.moe_kernel = None
