"""Shard a Hugging Face model over data-parallel ranks with FSDP2; with `dp_replicate`, over each copy's.

Units are decoder layers, and the root with the rest (embedding, final norm, head). With expert or tensor parallelism a
layer's experts are another unit, sharded over `expert_fsdp`.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from spmd_rl.distributed import Layout
from spmd_rl.model.load import local
from spmd_rl.model.moe import stacked_experts
from spmd_rl.train.recompute import decoder_layers


def shard(model: nn.Module, layout: Layout, dtype: torch.dtype, keep_gathered: bool) -> None:
    """[all] Shard `model` in place; passes compute in `dtype`, gradients are summed in the parameters'.

    Trainable parameters are all float32 (float64 in tests, where it separates mathematics from rounding); frozen ones
    of any dtype. keep_gathered: parameters stay gathered until `reshard`.
    """
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained <= {torch.float32} or trained == {torch.float64}, f"trainable parameters of {trained}"
    master = next(iter(trained), dtype)
    layers = decoder_layers(model)
    all_alike = {p.dtype for p in model.parameters()} == {dtype}

    casts = getattr(model, "casts_inputs", True)

    def policy(data_parallel: int) -> MixedPrecisionPolicy:
        # Alone, nothing is summed: a gradient is cast as it is added to what is there, not copied in `master` before.
        reduced = master if data_parallel > 1 else dtype
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=casts)
        # `mixed` would copy every gradient once more.
        return MixedPrecisionPolicy() if all_alike else mixed

    num_shards, copies = layout.size("fsdp"), layout.size("dp_replicate")
    common = {
        "mesh": layout.data_mesh,
        "mp_policy": policy(copies * num_shards),
        "shard_placement_fn": lambda p: placement(p.shape, num_shards),
    }
    # Experts are sharded over `expert_fsdp` alone, so they need a separate mesh.
    apart = set(stacked_experts(model).values()) if layout.shares_experts else set()
    for experts in apart:
        fully_shard(
            experts,
            mesh=layout.expert_data_mesh,
            # With how much weight an expert's answer counts is float32 in some models.
            mp_policy=replace(policy(copies * layout.size("expert_fsdp")), cast_forward_inputs=False),
            reshard_after_forward=not keep_gathered,
            shard_placement_fn=lambda p: placement(local(p).shape, layout.size("expert_fsdp")),
        )
    for layer in layers:
        fully_shard(layer, reshard_after_forward=not keep_gathered, **common)
    fully_shard(model, **common)
    for unit in fsdp_units(model):
        unit.set_reshard_after_backward(not keep_gathered, recurse=False)
        if (
            copies * layout.size("expert_fsdp" if unit in apart else "fsdp") == 1
        ):  # alone, a factor would only copy every gradient
            continue
        # The loss carries global weights, so ranks' gradients are summed. Neither setter reaches into submodules, and
        # gloo has no pre-multiplied sum, so that the second one is needed too.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def placement(shape: torch.Size, num_ranks: int) -> Shard | None:
    """Return the dimension that shards stacked experts; None for the first, as elsewhere."""
    # Experts are often fewer than ranks: with 128, each of 256 ranks would hold half of one, padded to a whole. Other
    # dimensions must divide: torch pads the first one alone.
    if len(shape) < 3 or shape[0] % num_ranks == 0:
        return None
    return next((Shard(dim) for dim in range(1, len(shape)) if shape[dim] % num_ranks == 0), None)


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Return the root first, then the layers."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which the root keeps after a forward without backward."""
    for unit in fsdp_units(model):
        unit.reshard()


def sum_over_copies(model: nn.Module, now: bool) -> None:
    """Make the next backward sum gradients over copies too; until then each copy accumulates."""
    fsdp_units(model)[0].set_requires_all_reduce(now)
