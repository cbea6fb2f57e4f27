"""Activation checkpointing: recomputation of a layer's activations in the backward pass.

`full` keeps a layer's input. `selective` also keeps attention's output and every second matrix product, which is most
of the work for half of the memory (torchtitan's `op` rule).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from spmd_rl.model.load import local_parts
from spmd_rl.model.moe import stacked_experts

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
ATTENTION = ("aten::_scaled_dot_product", "torch_attn::_varlen_attn")
"""Prefixes of attention kernels' names"""
# FSDP's hooks on experts mark what they do for the profiler, more often in the second pass, and torch would count it.
MARKS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
# Graphs of one function: kinds of modules, with and without gradients, for static and for varying sizes.
RECOMPILE_LIMIT = 64


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules, in order, that transformers marks as not to be split. The model must not be sharded yet."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    assert layers, f"{type(model).__name__} declares no layer class"
    return layers


def recompute(model: nn.Module, mode: str, compiles: bool = False) -> None:
    """Set up `mode` for the decoder layers, after adapters. compiles: also compile them."""
    if mode == "none" and not compiles:
        return
    # Layers with experts are compiled, and checkpointed, in parts around these: how many tokens each gets is data, on
    # which sizes of messages depend, and FSDP's hooks on experts break a graph.
    experts = set(stacked_experts(model).values()) if compiles else set()
    units = [unit for layer in decoder_layers(model) for unit in _around(experts, layer)]
    # With `lora.dropout` the second pass must draw the first one's mask. Else no layer draws random numbers, and their
    # state is not kept: on a device that would be a copy.
    draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if mode == "selective":
        options["context_fn"] = _contexts
        SAC_IGNORED_OPS.update(MARKS)
    # In `forward`, not around the module as transformers has it: a graph then holds both passes of the layer. Two
    # graphs of one layer (other shapes, recompiled) would keep other tensors, which torch refuses.
    for unit in units if mode != "none" else ():
        unit.forward = _checkpointed(unit.forward, options)
    if compiles:
        # All units share the code of `_checkpointed`, and so the limit: above it torch runs what it should compile.
        torch.compiler.config.recompile_limit = RECOMPILE_LIMIT
        for unit in units:
            if unit not in experts:
                unit.forward = _compiled(unit)


def _around(experts: set[nn.Module], module: nn.Module) -> list[nn.Module]:
    # The experts in a module, and the largest modules without any.
    if module in experts or experts.isdisjoint(module.modules()):
        return [module]
    return [unit for child in module.children() for unit in _around(experts, child)]


def _compiled(unit: nn.Module) -> Callable[..., Any]:
    forward, modules = torch.compile(unit.forward), unit.modules()
    shared = [(m, n) for m in modules for n, p in m.named_parameters(recurse=False) if isinstance(p, DTensor)]

    def compiled(*args: Any, **kwargs: Any) -> Any:
        # A graph that recomputes DTensors saves their mesh, which torch refuses.
        with local_parts(shared):
            return forward(*args, **kwargs)

    return compiled if shared else forward


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return checkpointed


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    # The recomputation must skip and save the same products as the forward pass.
    numbers = {False: count(), True: count()}
    return create_selective_checkpoint_contexts(partial(_policy, numbers))


def _policy(numbers: dict[bool, Iterator[int]], context: Any, op: OpOverload, *_: Any, **__: Any) -> CheckpointPolicy:
    name = op.name()
    keeps = name.startswith(ATTENTION) or (name in PRODUCTS and next(numbers[context.is_recompute]) % 2 == 0)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
