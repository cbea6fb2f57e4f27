"""Checkpoint names of a model's weights, where they differ from parameter names.

transformers renames some weights on loading, and merges others: a mixture's experts become one parameter. Published and
exported weights have checkpoint names, as vLLM, `from_pretrained` and users expect; each is a view of part of a
parameter.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from spmd_rl.base.errors import UserError


class Part(NamedTuple):
    """A checkpoint's tensor as part of a parameter."""

    name: str
    region: tuple[slice, ...]
    """region of the parameter, a slice per dimension"""
    is_expert: bool
    """True for one expert, whose stored tensor lacks the first dimension"""

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a whole parameter, as a view."""
        part = tensor[self.region]
        return part[0] if self.is_expert else part


def is_stacked(parts: Sequence[Part]) -> bool:
    """Return True if each part is one expert's."""
    return any(part.is_expert for part in parts)


def of_experts(parts: Sequence[Part], experts: Sequence[int]) -> list[Part]:
    """Return these experts' parts of a tensor that holds them in this order."""
    place = {expert: slice(i, i + 1) for i, expert in enumerate(experts)}
    mine = [part for part in parts if part.region[0].start in place]
    return [part._replace(region=(place[part.region[0].start], *part.region[1:])) for part in mine]


def stored_parts(model: nn.Module) -> dict[str, list[Part]]:
    """Return the parts of each parameter and saved buffer of an unsharded model, by name.

    UserError for a parameter stored neither under another name nor sliced by expert.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    parts = {name: [Part(name, tuple(slice(0, n) for n in shape), False)] for name, shape in shapes.items()}
    renamed = {}
    if hasattr(model, "base_model_prefix"):  # a model of transformers
        stored = revert_weight_conversion(model, {name: _meta(shape) for name, shape in shapes.items()})
        renamed = {name for name in shapes if name not in stored or stored[name].shape != shapes[name]}
    for name in renamed:
        found = revert_weight_conversion(model, {name: _meta(shapes[name])})
        parts[name] = _parts(model, name, shapes[name], {key: tensor.shape for key, tensor in found.items()})
    return parts


def _parts(model: nn.Module, name: str, shape: torch.Size, stored: Mapping[str, torch.Size]) -> list[Part]:
    if len(stored) == 1 and next(iter(stored.values())) == shape:
        return [Part(next(iter(stored)), tuple(slice(0, n) for n in shape), False)]
    if sum(part[0] for part in stored.values()) == shape[0] and {part[1:] for part in stored.values()} == {shape[1:]}:
        return _spans(model, name, shape)
    rows = {part[0] for part in stored.values()}
    fits = len(shape) == 3 and len(rows) == 1 and all(part[1:] == shape[2:] for part in stored.values())
    step = next(iter(rows), 1)
    if not fits or len(stored) * step != shape[0] * shape[1]:
        raise UserError(f"policy.model: how {type(model).__name__} stores {name} is not supported")
    # transformers converts an index tensor, whose result shows which slice belongs to which stored name.
    pieces = shape[1] // step
    numbers = torch.arange(shape[0] * pieces).view(shape[0], pieces, 1)
    parts = []
    for key, number in revert_weight_conversion(model, {name: numbers}).items():
        expert, piece = divmod(int(number), pieces)
        region = slice(expert, expert + 1), slice(piece * step, (piece + 1) * step), slice(0, shape[2])
        parts.append(Part(key, region, True))
    assert len(parts) == len(stored) and math.prod(shape[:2]) == step * len(parts)
    return parts


def _spans(model: nn.Module, name: str, shape: torch.Size) -> list[Part]:
    rest = tuple(slice(0, n) for n in shape[1:])
    numbers = torch.arange(shape[0]).view(-1, *(1 for _ in rest)).expand(shape)
    found = revert_weight_conversion(model, {name: numbers})
    firsts = {key: int(rows.min()) for key, rows in found.items()}
    return [Part(key, (slice(firsts[key], firsts[key] + len(rows)), *rest), False) for key, rows in found.items()]


def _meta(shape: torch.Size) -> Tensor:
    return torch.empty(shape, device="meta")
