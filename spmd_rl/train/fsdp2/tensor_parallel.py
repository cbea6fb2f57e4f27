"""Tensor parallelism: transformers' own plan of a model, carried out with torch's parallel styles.

Attention heads and the units of the feed-forward layers are shared out over the ranks of a block; the hidden states
between layers, embeddings, norms and the output projection are whole on each of them. Not supported: experts, and
key-value heads that several ranks would have to share.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spmd_rl.distributed import Layout
from spmd_rl.errors import UserError

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_PARTIAL = "replicated_with_grad_allreduce"
"""transformers' word for a weight that all ranks hold whole and that each applies to its own heads alone."""


def parallelize(model: nn.Module, layout: Layout) -> frozenset[str]:
    """[all] Share out the model's layers over the `tp` axis, in place, before FSDP shards them.

    Returns the names of parameters that every rank holds whole, but whose gradient on a rank is only a term of a sum.
    UserError, naming the setting, if transformers has no plan for the model or if the model's sizes do not divide.
    """
    if layout.size("tp") == 1:
        return frozenset()
    _check_sizes(model, layout)
    planned = {}
    for pattern, style in (model.config.get_text_config().base_model_tp_plan or {}).items():
        if pattern.startswith("layers."):
            matched = fnmatchcase
            names = [name for name, _ in model.named_modules() if matched(name, f"{model.base_model_prefix}.{pattern}")]
            planned |= dict.fromkeys(names, style)
    unknown = sorted({style for style in planned.values() if style not in _STYLES and style != _PARTIAL})
    if unknown or not planned:
        reason = f"uses {unknown[0]!r}, which is not supported" if unknown else "says nothing of its layers"
        raise UserError(f"{layout.key}.tp: transformers' plan for {type(model).__name__} {reason}; must be 1")
    styles = {name: _STYLES[style]() for name, style in planned.items() if style in _STYLES}
    # without a source rank nothing travels: each rank keeps its own part of what it holds
    parallelize_module(model, layout.mesh["tp"], styles, src_data_rank=None)
    partial = [name for name, style in planned.items() if style == _PARTIAL]
    return frozenset(n for n, _ in model.named_parameters() if n.rpartition(".")[0] in partial)


def _check_sizes(model: nn.Module, layout: Layout) -> None:
    config, tp = model.config.get_text_config(), layout.size("tp")
    heads = config.num_attention_heads
    sizes = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "feed-forward units": config.intermediate_size,
    }
    fitting = [n for n in range(1, heads + 1) if not any(size % n for size in sizes.values())]
    if tp not in fitting:
        counted = ", ".join(f"{size} {what}" for what, size in sizes.items())
        raise UserError(
            f"{layout.key}.tp: {tp} ranks cannot share the {counted} of {config.name_or_path or type(model).__name__}; "
            f"sizes that fit: {', '.join(map(str, fitting))}"
        )


def sharded_dim(parameter: Tensor) -> int | None:
    """The dimension in which the ranks of a block share a parameter out; None where each of them holds it whole."""
    if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return None
    placement = parameter.placements[parameter.device_mesh.mesh_dim_names.index("tp")]
    return placement.dim if placement.is_shard() else None


def whole(tensor: Tensor, parameter: Tensor, layout: Layout) -> Tensor:
    """[all] All of a parameter, from each rank's part of it; `tensor` itself where each rank holds all."""
    dim = sharded_dim(parameter)
    if dim is None:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(layout.size("tp"))]
    dist.all_gather(parts, tensor.contiguous(), group=layout.group("tp"))
    return torch.cat(parts, dim)


def complete_gradients(gradients: Mapping[str, Tensor], partial: frozenset[str], layout: Layout) -> None:
    """[all] Make the gradients of parameters that every rank of a block holds whole the same on all of them, in place.

    `partial` ones are summed. The others are computed alike by all, and are taken from the first rank: on a device
    whose additions have no fixed order the copies of a weight would drift apart.
    """
    group = layout.group("tp")
    for name, gradient in gradients.items():
        if name in partial:
            dist.all_reduce(gradient, group=group)
        else:
            dist.broadcast(gradient, group=group, group_src=0)
