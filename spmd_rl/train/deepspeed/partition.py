"""Which flat part of a parameter this rank's ZeRO optimizer holds: its float32 master, its moments, its gradient.

A flat part is no rectangle, but a few of them: `boxes`. So each rank saves and loads what it holds, without meeting the
others.
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
    """The masters, moments and gradients of a model's trained parameters, as far as they are on this rank; flat."""

    def __init__(
        self, utils: ModuleType, engine: Any, parameters: Mapping[str, Parameter], group: dist.ProcessGroup
    ) -> None:
        """utils: `deepspeed.utils`. engine: DeepSpeed's, over the ranks of `group`, of the trained `parameters`."""
        self._utils, self._group, self._parameters = utils, group, parameters
        self._zero, self._optimizer = engine.optimizer, engine.basic_optimizer
        self._is_whole = not any(hasattr(p, "ds_id") for p in self._parameters.values())
        self._copies: list[tuple[Parameter, str, Tensor]] = []
        self.held = {name: self._held(p) for name, p in self._parameters.items()}
        """By parameter, which of its flat elements have their masters on this rank"""
        self.flats: list[Tensor] = [p for group in self._optimizer.param_groups for p in group["params"]]
        """What the optimizer steps, float32: masters end to end"""
        if not self._is_whole:
            self.flats = list(self._zero.fp32_partitioned_groups_flat)

    def _held(self, p: Parameter) -> slice:
        if not self._is_whole:
            return weights_here(p, self._group)[0]
        if p._hp_mapping is None:  # stages 1 and 2 cut all of them together
            return slice(0, 0)
        address = p._hp_mapping.lp_fragment_address
        return slice(address.start, address.start + address.numel)

    def tensor(self, name: str, moment: str = "") -> Tensor:
        """The live elements `held` of a master, or of a moment of it; see `refresh`."""
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
        self._copies.append((p, moment, found))  # on a device it is a copy of what lies on the host
        return found[: own.stop - own.start]

    def gradients(self) -> list[Tensor]:
        """Summed gradients, flat: this rank's share of each. Between the last backward pass and the step."""
        found = []
        for name, own in self.held.items():
            p = self._parameters[name]
            if own.start == own.stop:
                continue
            if not self._is_whole:
                found.append(self._utils.safe_get_local_grad(p).flatten()[: own.stop - own.start])
                continue
            grad = p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group).flatten()
            # in bfloat16, stage 1 keeps those of all ranks
            found.append(grad[own] if len(grad) == p.numel() else grad)
        return found

    @torch.no_grad()
    def refresh(self) -> None:
        """[all] Take over what was written into `tensor`: into the optimizer, and rounded into the weights."""
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
        """Free what `tensor` has copied."""
        self._copies.clear()


def weights_here(p: Parameter, group: dist.ProcessGroup) -> tuple[slice, Tensor]:
    """Which flat elements of a parameter this rank has in the compute dtype, and these, live."""
    if not hasattr(p, "ds_id"):
        return slice(0, p.numel()), p.data.view(-1)
    size = p.ds_tensor.numel()  # stage 3 cuts each parameter into equal parts, the last ones padded
    begin = min(dist.get_rank(group) * size, p.ds_numel)
    own = slice(begin, min(begin + size, p.ds_numel))
    return own, p.ds_tensor.data[: own.stop - own.start]


def whole(module: nn.Module) -> Fill:
    """How parts of a module's weights are read that it has now, whatever becomes of it."""
    held = {name: tensor.detach() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    return lambda name, region, target: target.copy_(held[name][region])


@torch.no_grad()
def spread(module: nn.Module, dtype: torch.dtype, device: torch.device, share: Callable[[Parameter], None]) -> None:
    """[all] Give each parameter in turn memory on `device`, in place of what it holds, and `share` it; ties stay."""
    made: dict[int, Parameter] = {}
    for holder in module.modules():
        for key, p in holder.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) not in made:
                made[id(p)] = Parameter(torch.zeros_like(p, dtype=dtype, device=device), p.requires_grad)
                share(made[id(p)])  # [all]
            setattr(holder, key, made[id(p)])


def pieces(shape: Sequence[int], own: slice, flat: Tensor) -> Iterator[tuple[Region, Tensor]]:
    """The elements `own` of a tensor of this shape, which are `flat`, as regions of it and views of these."""
    begin = 0
    for region in boxes(shape, own.start, own.stop):
        sizes = [part.stop - part.start for part in region]
        yield region, flat[begin : begin + math.prod(sizes)].view(sizes)
        begin += math.prod(sizes)


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Region]:
    """The flat elements [begin, end) of a tensor as rectangular regions, in order: each is contiguous in it."""
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
