"""The shapes of the weights that vLLM's loader wants, and the weights as it holds them afterwards.

vLLM fuses projections that read the same input, and on the CPU packs every matrix in a layout of its own. What it keeps
plain can be compared bit by bit with what it was given; for the rest the probe must speak (`weights/probe.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from spmd_rl.hub import model_folder
from spmd_rl.model.build import weights_of


def expected_shapes(path: Path | str, trust: bool = False) -> dict[str, torch.Size]:
    """Hugging Face name -> shape of each weight, from `path/config.json` alone; tied ones under the first."""
    config = AutoConfig.from_pretrained(model_folder(path), trust_remote_code=trust)
    with torch.device("meta"), no_init_weights():
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    module.tie_weights()
    return {name: weight.shape for name, weight in weights_of(module).items()}


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


def plain_weights(
    model: nn.Module, shapes: Mapping[str, torch.Size], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor | None]]:
    """vLLM's own tensor for each Hugging Face name, where it keeps it plain and whole; else None. At tp=1.

    The rows of a fused projection lie in the order in which vLLM's model class lists its parts.
    """
    fused = {
        part: (one, parts) for one, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts
    }
    named = model.named_parameters(remove_duplicate=False)
    parameters = {name.replace(".base_layer.", "."): tensor for name, tensor in named}  # so called beside an adapter
    for name, shape in shapes.items():
        *stem, module, kind = name.split(".")
        one, parts = fused.get(module, (module, [module]))
        begin = sum(shapes[".".join([*stem, part, kind])][0] for part in parts[: parts.index(module)])
        tensor = parameters.get(".".join([*stem, one, kind]))
        whole = tensor is not None and tensor.dtype == dtype and tensor.shape[1:] == shape[1:]
        rows = tensor[begin : begin + shape[0]] if whole else None
        yield name, rows if rows is not None and rows.shape == shape else None
