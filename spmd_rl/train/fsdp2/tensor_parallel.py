"""Tensor parallelism by transformers' plan of a model, with sequence parallelism and a sharded vocabulary.

A block's ranks shard attention heads, feed-forward units and the vocabulary. In between each has a span of the row's
tokens (Korthikanti et al., arXiv 2205.05198); a block of layers all-gathers tokens before it and reduce-scatters its
output. So each rank has a different term of the loss, and a replicated weight's gradient (norms, routers, biases of
sums, value head) is a sum over ranks. Experts are not cut: see `experts.py`. Layers with a state compute all tokens on
each rank.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from spmd_rl.base.errors import UserError
from spmd_rl.distributed import Layout
from spmd_rl.model.differentiable import gather_rows, sum_rows
from spmd_rl.model.hybrid import stateful_layers
from spmd_rl.model.load import local, local_parts, owned_region, share
from spmd_rl.model.logprobs import TokenHead
from spmd_rl.model.moe import stacked_experts
from spmd_rl.train.adapters import wrapped
from spmd_rl.train.fsdp2.stages import PassThrough

COLUMNS, ROWS = "colwise", "rowwise"
"""transformers' names for layers with sharded outputs, and with sharded, summed inputs"""
_WHOLE = "replicated_with_grad_allreduce"
"""transformers' name for a replicated weight that ranks apply to their own heads"""
KEYS_AND_VALUES = ("k_proj", "v_proj")


def parallelize(model: nn.Module, layout: Layout) -> None:
    """[all] Shard the model over the `tp` axis, in place, before FSDP.

    Its forward takes and returns all tokens of the row, a multiple of the axis' size. UserError, naming the setting, if
    transformers has no plan or sizes do not divide.
    """
    if layout.size("tp") == 1:
        return
    mesh, group = layout.mesh["tp"], layout.group("tp")
    planned, modules = _plan(model, layout), dict(model.named_modules())
    copies = _copies_of_keys(model, layout, planned)
    for name, style in planned.items():
        if style == COLUMNS:
            for linear in wrapped(modules[name], "lora_B"):
                _share_outputs(linear, mesh, copies if name.endswith(KEYS_AND_VALUES) else 1)
        elif style == ROWS:
            # `lora_A` computes partial sums over sharded inputs; `lora_B` gets their sum.
            for linear in wrapped(modules[name], "lora_A"):
                _share_inputs(linear, mesh, group)
    for block in _blocks(planned, ROWS):
        modules[block].forward = _of_all_tokens(modules[block].forward, group)
    for layer in stateful_layers(model):
        layer.forward = _of_own_tokens(_of_all_tokens(layer.forward, group), group)
    _share_vocabulary(model, mesh, group)


def _plan(model: nn.Module, layout: Layout) -> dict[str, str]:
    planned, inside, kept = {}, f"{model.base_model_prefix}.", set(stacked_experts(model))
    for layer in stateful_layers(model):
        whole = set(layer.modules())
        kept |= {name for name, module in model.named_modules() if module in whole}
    for pattern, style in (model.config.get_text_config().base_model_tp_plan or {}).items():
        if pattern.startswith("layers."):
            names = [name for name, _ in model.named_modules() if fnmatchcase(name, inside + pattern)]
            planned |= dict.fromkeys([name for name in names if name not in kept], style)
    if reason := _unsupported(model, planned):
        raise UserError(f"{layout.key}.tp: transformers' plan for {type(model).__name__} {reason}; must be 1")
    return planned


def _unsupported(model: nn.Module, planned: Mapping[str, str]) -> str:
    if unknown := sorted({style for style in planned.values() if style not in (COLUMNS, ROWS, _WHOLE)}):
        return f"uses {unknown[0]!r}, which is not supported"
    if not planned:
        return "does not cover its layers"
    blocks = _blocks(planned, ROWS)
    if alone := _blocks(planned, COLUMNS) - blocks:
        return f"splits {min(alone)} and never sums its parts"
    attention = {name for name, module in model.named_modules() if type(module).__name__.endswith("Attention")}
    return f"leaves out {min(attention - blocks)}, which must see all tokens" if attention - blocks else ""


def _blocks(planned: Mapping[str, str], style: str) -> set[str]:
    return {name.rpartition(".")[0] for name, planned_style in planned.items() if planned_style == style}


def _copies_of_keys(model: nn.Module, layout: Layout, planned: Mapping[str, str]) -> int:
    """Return the number of ranks with the same key-value head, above 1 if heads are fewer. UserError if sizes do not
    fit."""
    config, tp = model.config.get_text_config(), layout.size("tp")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = {"attention heads": heads, "key-value heads": kv_heads}
    outside = [n for n, style in planned.items() if style == COLUMNS and not n.rpartition(".")[0].endswith("attn")]
    # None where all feed-forward layers are mixtures, whose experts are not sharded here.
    if units := gcd(*(model.get_submodule(name).out_features for name in outside)):
        sizes["feed-forward units"] = units
    apart = all(any(name.endswith(projection) for name in planned) for projection in KEYS_AND_VALUES)
    fitting = [
        n
        for n in range(1, heads + 1)
        if not heads % n and not units % n and (not kv_heads % n or (apart and not n % kv_heads))
    ]
    if tp not in fitting:
        counted = ", ".join(f"{size} {what}" for what, size in sizes.items())
        raise UserError(
            f"{layout.key}.tp: {tp} ranks cannot share the {counted} of {config.name_or_path or type(model).__name__}; "
            f"sizes that fit: {', '.join(map(str, fitting))}"
        )
    return max(1, tp // kv_heads)


def _share_outputs(linear: nn.Linear, mesh: DeviceMesh, copies: int) -> None:
    """Shard outputs over ranks; `copies` neighbours share each part, with whole weights if several."""
    rows = None
    if copies == 1:
        _distribute(linear, "weight", mesh, 0)
        if linear.bias is not None:
            _distribute(linear, "bias", mesh, 0)
    else:
        rows = share(slice(0, linear.out_features), mesh.size() // copies, mesh.get_local_rank() // copies)
    # No `partial`, whose identity a compiled graph would depend on: layers could not share it.
    linear.forward = lambda x: _some_outputs(linear, rows, x)


def _share_inputs(linear: nn.Linear, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    _distribute(linear, "weight", mesh, 1)
    linear.forward = lambda x: _sum_of_inputs(linear, group, x)


def _share_vocabulary(model: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    # Rows of embedding and head are sharded over ranks, tokens in between. Pipeline stages do their share, and exchange
    # each rank's span of tokens.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    if embedding.weight is not None:
        _distribute(embedding, "weight", mesh, 0)
    if tied:
        head.weight = embedding.weight
    elif isinstance(head, TokenHead) or (isinstance(head, PassThrough) and head.weight is not None):
        _distribute(head, "weight", mesh, 0)
    if not isinstance(embedding, PassThrough):
        _share_look_up(embedding, group)
    model.base_model.register_forward_hook(partial(_gather_result, model, group))
    if not isinstance(head, PassThrough | TokenHead):
        head.register_forward_hook(partial(_computed_alike, group.size()))


def _share_look_up(embedding: nn.Embedding, group: dist.ProcessGroup) -> None:
    own = owned_region(embedding.weight)[0]
    # The padding row gets no gradient.
    if embedding.padding_idx is not None:
        inside = own.start <= embedding.padding_idx < own.stop
        embedding.padding_idx = embedding.padding_idx - own.start if inside else None
    embedding.forward = partial(_look_up, embedding, own, group)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Keep this rank's part of a parameter, whole on each rank or on meta, without communication."""
    whole = getattr(module, name)
    part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _some_outputs(linear: nn.Linear, rows: slice | None, x: Tensor) -> Tensor:
    weight, bias = local(linear.weight), None if linear.bias is None else local(linear.bias)
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    return F.linear(x, weight, bias)


def _sum_of_inputs(linear: nn.Linear, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """[all] [1, t, inputs / size] -> [1, t / size, outputs]; the same without the first dimension."""
    out = F.linear(x, local(linear.weight))
    out = sum_rows(out.flatten(0, -2), group).unflatten(0, (*x.shape[:-2], -1))
    return out if linear.bias is None else out + linear.bias


def _look_up(embedding: nn.Embedding, own: slice, group: dist.ProcessGroup, token_ids: Tensor) -> Tensor:
    """[all] [1, t] -> [1, t / size, h]: one rank has a token's row, the others add zeros."""
    outside = (token_ids < own.start) | (token_ids >= own.stop)
    # The module's own forward runs, because some families scale the embeddings.
    with local_parts([(embedding, "weight")]):
        found = type(embedding).forward(embedding, (token_ids - own.start).masked_fill(outside, 0))
    return sum_rows(found.masked_fill(outside[..., None], 0.0)[0], group)[None]


def _of_all_tokens(forward: Callable[..., Any], group: dist.ProcessGroup) -> Callable[..., Any]:
    # No hook, so that a checkpoint of the block keeps this rank's tokens alone.
    def gathered(*args: Any, **kwargs: Any) -> Any:
        if args:
            return forward(_all_tokens(args[0], group), *args[1:], **kwargs)  # [all]
        return forward(**kwargs | {"hidden_states": _all_tokens(kwargs["hidden_states"], group)})  # [all]

    return gathered


def _all_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[all] [1, t / size, h] -> [1, t, h]; the same without the first dimension."""
    return gather_rows(x.flatten(0, -2), group).unflatten(0, (*x.shape[:-2], -1))


def _of_own_tokens(forward: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: forward(*args, **kwargs).chunk(group.size(), 1)[group.rank()]


def _gather_result(model: nn.Module, group: dist.ProcessGroup, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """[all] Return all tokens' hidden states for the head; in a pipeline only in the last chunk."""
    if not isinstance(model.get_output_embeddings(), PassThrough):
        output.last_hidden_state = gather_rows(output.last_hidden_state[0], group)[None]
    return output


def _computed_alike(size: int, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Return an output equal on all ranks, of which each passes back an equal part of the gradient."""
    return output.detach() + (output - output.detach()) / size


def sharded_dim(parameter: Tensor) -> int | None:
    """Return the dimension in which a block's ranks shard a parameter; None if each has it whole."""
    if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return None
    placement = parameter.placements[parameter.device_mesh.mesh_dim_names.index("tp")]
    return placement.dim if placement.is_shard() else None


def is_repeated(parameter: Tensor) -> bool:
    """Return True if a block's ranks have equal parameters: neither sharded nor an expert's."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return sharded_dim(parameter) is None and "expert_fsdp" not in (names or ())


def shape_of_share(parameter: Tensor, layout: Layout) -> torch.Size:
    """Return the shape of a parameter that this rank and its peers in other blocks hold together."""
    shape, dim = list(parameter.shape), sharded_dim(parameter)
    if dim is not None:
        own = share(slice(0, shape[dim]), layout.size("tp"), layout.rank("tp"))
        shape[dim] = own.stop - own.start
    return torch.Size(shape)


def whole(tensor: Tensor, parameter: Tensor, layout: Layout) -> Tensor:
    """[all] Return a whole parameter from each rank's part, or `tensor` if it is whole."""
    dim = sharded_dim(parameter)
    if dim is None:
        return tensor
    size, length = layout.size("tp"), parameter.shape[dim]
    # Size on the first ranks; the last may have fewer.
    piece = -(-length // size)
    shape = [*tensor.shape[:dim], piece, *tensor.shape[dim + 1 :]]
    mine = tensor.new_zeros(shape)
    mine.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine, group=layout.group("tp"))
    return torch.cat(parts, dim).narrow(dim, 0, length).contiguous()


def complete_gradients(gradients: Mapping[str, Tensor], layout: Layout) -> None:
    """[all] Sum replicated parameters' gradients over a block's ranks, in place."""
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=layout.group("tp"))
