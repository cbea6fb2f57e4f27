"""Mixtures of experts: their modules in a model, and expert parallelism.

    for experts in stacked_experts(model):
        spread(experts, group)

Each rank holds some experts of every layer. A forward sends hidden states to the ranks of their experts and receives
outputs (GShard: Lepikhin et al., arXiv 2006.16668). No token is dropped; one with two experts on a rank is sent twice.
"""

from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from spmd_rl.base.devices import kind
from spmd_rl.config.architectures import EXPERT_COUNTS
from spmd_rl.model.differentiable import exchange_rows

ALIGNED_BYTES = 16
"""Row alignment of torch's grouped product on devices, in bytes"""


def num_experts(config: PreTrainedConfig) -> int:
    """Return routed experts per mixture layer; 0 for a dense model. config: of the text model."""
    return next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), 0)


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, transformers' modules with all experts of a layer in parameters [experts, ...].

    Forward: hidden states [T, H], chosen experts (int64 [T, k]), routing weights ([T, k]) -> [T, H].
    """
    return {name: m for name, m in model.named_modules() if hasattr(m, "is_transposed") and hasattr(m, "num_experts")}


def router_class(model: nn.Module) -> type[nn.Module] | None:
    """Return the class of modules that compute experts' logits, if transformers has one.

    Forward returns logits [T, E], and weights and indices of chosen experts, [T, k] each.
    """
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if recorded is None and getattr(model.config, "model_type", "") == "deepseek_v3":
        # Version 5.17 of transformers has no record of it.
        return import_module("transformers.models.deepseek_v3.modeling_deepseek_v3").DeepseekV3TopkRouter
    return getattr(recorded, "target_class", None)


def probabilities(router: nn.Module, logits: Tensor) -> Tensor:
    """Return experts' probabilities: float32 (or float64, as `logits`) [T, E], rows that sum to 1.

    A DeepSeek-V3 router's sigmoid scores are normalised.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if not hasattr(router, "e_score_correction_bias"):
        return torch.softmax(logits, -1, dtype=dtype)
    scores = logits.to(dtype).sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def weights_of_chosen(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the routing weights of `chosen` (int64 [T, k]) from logits [T, E], with gradient.

    For routers that weigh by probability, renormalised or not, and DeepSeek-V3's.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    competes = not hasattr(router, "e_score_correction_bias")
    scores = torch.softmax(logits, -1, dtype=dtype) if competes else logits.to(dtype).sigmoid()
    weights = scores.gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * getattr(router, "routed_scaling_factor", 1.0)).to(logits.dtype)


def spread(experts: nn.Module, group: dist.ProcessGroup) -> None:
    """Make such a module's forward exchange tokens in `group`, whose rank r has the r-th part of the experts.

    Parameters may be DTensors on a mesh of these ranks.
    """
    assert experts.has_gate and not experts.is_transposed and not experts.has_bias, "see `is_supported`"
    experts.forward = partial(_forward, experts, group)


def is_supported(experts: nn.Module) -> bool:
    """Return True for gated linear units without biases."""
    return experts.has_gate and not experts.is_transposed and not experts.has_bias


def _forward(experts: nn.Module, group: dist.ProcessGroup, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[all] Compute experts' outputs with exchange of tokens, see `stacked_experts`."""
    top_k = chosen.shape[1]
    # A stable order: each expert gets its tokens in the order of the row.
    order = torch.argsort(chosen.flatten(), stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts.num_experts).view(group.size(), -1)
    incoming = torch.empty_like(counts)
    # Counts first: each rank must know how many rows it receives.
    dist.all_to_all_single(incoming, counts, group=group)
    # The only synchronisation with the device: sizes of messages must be known on the host.
    sent, received = torch.stack([counts, incoming]).tolist()
    lengths = [sum(row) for row in sent], [sum(row) for row in received]
    rows = exchange_rows(hidden[order // top_k], *lengths, group)
    # From each rank a run of rows for each expert; the experts want one run each.
    runs = torch.arange(counts.shape[1]).repeat(group.size()).repeat_interleave(torch.tensor(received).flatten())
    by_expert = torch.argsort(runs, stable=True).to(rows.device)
    made = _compute(experts, rows[by_expert], [sum(column) for column in zip(*received, strict=True)])
    back = exchange_rows(made[_inverse(by_expert)], *reversed(lengths), group)
    out = back[_inverse(order)].view(-1, top_k, hidden.shape[1]) * weights[..., None]
    return out.sum(1).to(hidden.dtype)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _compute(experts: nn.Module, rows: Tensor, counts: list[int]) -> Tensor:
    """Return this rank's experts' outputs, [n, H]; the first counts[0] rows are the first's."""
    gate_up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (experts.gate_up_proj, experts.down_proj))
    return grouped_linear(experts._apply_gate(grouped_linear(rows, gate_up, counts)), down, counts)


def grouped_linear(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Multiply each group of rows by its transposed matrix: [n, I], [G, O, I] -> [n, O]; groups may be empty.

    All of `weights` gets a gradient.
    """
    widths = {width * rows.element_size() % ALIGNED_BYTES for width in weights.shape[1:]}
    # The grouped product is for devices, aligned rows and dtypes below float64.
    if kind(rows.device) == "cpu" or rows.dtype == torch.float64 or widths != {0}:
        groups = zip(rows.split(counts), weights.unbind(), strict=True)
        return torch.cat([F.linear(some, weight) for some, weight in groups])
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(rows.device)
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
