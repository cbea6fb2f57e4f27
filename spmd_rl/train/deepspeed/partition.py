"""Flat part of each parameter in this rank's ZeRO optimizer: float32 master, moments and gradient.

It is a union of a few rectangles (`boxes`), so ranks save and load it without communication.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from spmd_rl.model.load import Fill, Region


class Partition:
    """This rank's flat parts of trained parameters."""

    def __init__(
        self, utils: ModuleType, engine: Any, parameters: Mapping[str, Parameter], group: dist.ProcessGroup
    ) -> None:
        """utils: `deepspeed.utils`. engine: DeepSpeed's, over the ranks of `group`."""
        self._utils, self._group, self._parameters = utils, group, parameters
        self._zero, self._optimizer = engine.optimizer, engine.basic_optimizer
        self._is_whole = not any(hasattr(p, "ds_id") for p in self._parameters.values())
        self._copies: list[tuple[Parameter, str, Tensor]] = []
        self.held = {name: self._held(p) for name, p in self._parameters.items()}
        """Flat elements of each parameter whose masters are on this rank"""
        self.flats: list[Tensor] = [p for group in self._optimizer.param_groups for p in group["params"]]
        """Float32 masters end to end, which the optimizer steps"""
        if not self._is_whole:
            self.flats = list(self._zero.fp32_partitioned_groups_flat)

    def _held(self, p: Parameter) -> slice:
        if not self._is_whole:
            return weights_here(p, self._group)[0]
        # Stages 1 and 2 partition one flat tensor of all parameters, so this rank may hold nothing of this one.
        if p._hp_mapping is None:
            return slice(0, 0)
        address = p._hp_mapping.lp_fragment_address
        return slice(address.start, address.start + address.numel)

    def tensor(self, name: str, moment: str = "") -> Tensor:
        """Return the live elements `held` of a master or moment; see `refresh`."""
        p, own = self._parameters[name], self.held[name]
        if self._is_whole:
            if own.start == own.stop:
                return torch.empty(0)
            kept = self._optimizer.state[self.flats[0]][moment] if moment else self.flats[0]
            address = p._hp_mapping.get_hp_fragment_address()
            return kept.detach().narrow(0, address.start, address.numel)
        utils = self._utils
        found = utils.safe_get_local_optimizer_state(p, moment) if moment else utils.safe_get_local_fp32_param(p)
        found = found.detach()
        # On a device this is a copy of the tensor on the host; `refresh` writes it back.
        self._copies.append((p, moment, found))
        return found[: own.stop - own.start]

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's flat part of each summed gradient, between the last backward and the step."""
        found = {}
        for name, own in self.held.items():
            p = self._parameters[name]
            if own.start == own.stop:
                continue
            if not self._is_whole:
                found[name] = self._utils.safe_get_local_grad(p).flatten()[: own.stop - own.start]
                continue
            grad = p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group).flatten()
            # In bfloat16, stage 1 keeps those of all ranks.
            found[name] = grad[own] if len(grad) == p.numel() else grad
        return found

    @torch.no_grad()
    def refresh(self) -> None:
        """[all] Copy what was written into `tensor` to optimizer and, rounded, weights."""
        for p, moment, found in self._copies:
            if moment:
                self._utils.safe_set_local_optimizer_state(p, found, moment)
            else:
                self._utils.safe_set_local_fp32_param(p, found)
        self.forget()
        if self._is_whole:
            self._zero.update_lp_params()  # [all]
            return
        for p in self._parameters.values():
            p.ds_tensor.data.copy_(self._utils.safe_get_local_fp32_param(p))

    def forget(self) -> None:
        """Free the copies that `tensor` made."""
        self._copies.clear()


def weights_here(p: Parameter, group: dist.ProcessGroup) -> tuple[slice, Tensor]:
    """Return the flat elements of a parameter on this rank in the compute dtype, as range and live tensor."""
    if not hasattr(p, "ds_id"):
        return slice(0, p.numel()), p.data.view(-1)
    # Stage 3 partitions each parameter into equal parts; the last ones are padded.
    size = p.ds_tensor.numel()
    begin = min(dist.get_rank(group) * size, p.ds_numel)
    own = slice(begin, min(begin + size, p.ds_numel))
    return own, p.ds_tensor.data[: own.stop - own.start]


def whole(module: nn.Module) -> Fill:
    """Return a reader of present weights that stays valid when the module changes."""
    held = {name: tensor.detach() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    return lambda name, region, target: target.copy_(held[name][region])


@torch.no_grad()
def spread(module: nn.Module, dtype: torch.dtype, device: torch.device, share: Callable[[Parameter], None]) -> None:
    """[all] Give each parameter new memory on `device` in turn and `share` it; ties are kept."""
    made: dict[int, Parameter] = {}
    for holder in module.modules():
        for key, p in holder.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) not in made:
                made[id(p)] = Parameter(torch.zeros_like(p, dtype=dtype, device=device), p.requires_grad)
                share(made[id(p)])  # [all]
            setattr(holder, key, made[id(p)])


def pieces(shape: Sequence[int], own: slice, flat: Tensor) -> Iterator[tuple[Region, Tensor]]:
    """Yield the elements `own` of a tensor of this shape as regions, with views of `flat`."""
    begin = 0
    for region in boxes(shape, own.start, own.stop):
        sizes = [part.stop - part.start for part in region]
        yield region, flat[begin : begin + math.prod(sizes)].view(sizes)
        begin += math.prod(sizes)


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Region]:
    """Yield the flat elements [begin, end) of a tensor as contiguous rectangular regions in order."""
    if begin >= end:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the rows that are whole
    if begin % row:
        part = boxes(shape[1:], begin % row, min(row, end - (first - 1) * row))
        yield from ((slice(first - 1, first), *region) for region in part)
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    if first <= last and end % row:
        yield from ((slice(last, last + 1), *region) for region in boxes(shape[1:], 0, end % row))
