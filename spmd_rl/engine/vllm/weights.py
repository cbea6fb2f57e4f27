"""What vLLM packs on the CPU in a layout of its own, and would not pack anew when its weights are loaded again."""

from torch import nn
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def repack_heads(model: nn.Module) -> None:
    """Let output heads take up the embedding they are tied to: a reload passes over a layer that no name belongs to.

    On the CPU a head computes with a packed copy, which would stay the one of before. Elsewhere this does nothing.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def unpack_experts(model: nn.Module) -> None:
    """Let the next reload pack the experts of a mixture once more: vLLM does so the first time alone.

    On the CPU experts compute with packed weights, and would take the plain ones of a reload for such. Elsewhere this
    does nothing: what is not packed is copied to where captured graphs look for it.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and module.w13_weight.device.type == "cpu":
            method.moe_kernel = None
