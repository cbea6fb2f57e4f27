"""Adapters on Megatron, whose sharded linear layers fuse several of the checkpoint.

Each linear layer of the checkpoint has an `A` and a `B`, replicated on tensor-parallel ranks and stored as in other
backends. The input is multiplied by all `A` at once, whose few columns ranks exchange, then by this rank's rows of `B`.
Megatron sums ranks' terms of the gradients like those of norms.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor, nn

from spmd_rl.config.sections.lora import LoraConfig
from spmd_rl.model.differentiable import gather_rows, sum_rows
from spmd_rl.model.lora import PREFIX, A, B
from spmd_rl.train.adapters import StoredAdapters, targets
from spmd_rl.train.megatron.mapping import Piece, Rule, Shapes, TensorShare, Whole
from spmd_rl.train.megatron.parameters import LAYERS, Experts

INSIDE = ".adapters."
"""Separator in names between Megatron's layer and the adapter"""


class MegatronAdapters(StoredAdapters):
    """Adapters of one model; none without `settings`."""

    def __init__(self, settings: LoraConfig, module: nn.Module, rules: Mapping[str, Rule], key: str) -> None:
        """module: of transformers, for layer names. key: of the layout."""
        super().__init__(settings, targets(module, settings.targets, key) if settings.rank else [])
        self._is_on = True
        kinds = {re.sub(r"\.\d+\.", ".{}.", layer) for layer in self.layers}
        self.rules: dict[str, Rule] = {}
        """Rules of the model, each after its adapters'"""
        for name, rule in rules.items():
            for layer, _, kind in (stored.rpartition(".") for stored in rule.names):
                if name.startswith(LAYERS) and kind == "weight" and layer in kinds:
                    fused, own = name.removesuffix(".weight"), layer.rpartition(".")[2]
                    self.rules[f"{fused}{INSIDE}a.{own}"] = Whole(PREFIX + layer + A)
                    self.rules[f"{fused}{INSIDE}b.{own}"] = Whole(PREFIX + layer + B)
            self.rules[name] = rule

    def trains(self, name: str) -> bool:
        """Return True if this parameter is trained."""
        return not self.layers or INSIDE in name

    def attach(
        self,
        chunks: Mapping[GPTModel, range],
        shapes: Shapes,
        group: dist.ProcessGroup,
        head_dim: int,
        experts: Experts,
    ) -> None:
        """Put this rank's adapters into its chunks. group: tensor-parallel ranks."""
        share = TensorShare(group.rank(), group.size(), head_dim)
        fused = {name.partition(INSIDE)[0] for name in self.rules if INSIDE in name}
        for chunk, layers in chunks.items() if fused else ():
            for place, number in enumerate(layers):
                for name in (name for name in fused if experts.fit(name, number)):
                    linear = chunk.get_submodule(name.format(place))
                    pieces = self.rules[f"{name}.weight"].named(number).pieces(shapes, share)
                    own = [one for one in pieces if one.name.removesuffix(".weight") in self.layers]
                    linear.adapters = FusedAdapters(linear, own, self.settings, group)
                    linear.register_forward_hook(self._add)
            # Recomputed layers have gradients only if their input requires one.
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(lambda _, __, hidden: hidden.requires_grad_())

    def _add(self, linear: nn.Module, args: tuple[Tensor], found: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        out, bias = found
        return out + linear.adapters(args[0]) if self._is_on else out, bias  # [all] of those that share the layer out

    @contextmanager
    def hidden(self, hides: bool) -> Iterator[None]:
        """Turn the adapters off inside."""
        self._is_on = not hides
        yield
        self._is_on = True


class FusedAdapters(nn.Module):
    """Adapters of one Megatron linear layer."""

    def __init__(self, linear: nn.Module, pieces: list[Piece], settings: LoraConfig, group: dist.ProcessGroup) -> None:
        """pieces: of the weight, with adapters."""
        super().__init__()
        self._group, self._scaling = group, settings.scaling
        # Each rank computes its own tokens with a replicated layer.
        is_whole = isinstance(linear, nn.Linear)
        self._exchange = sum_rows if isinstance(linear, RowParallelLinear) else None if is_whole else gather_rows
        first, count = {}, 0
        make = partial(torch.empty, device=linear.weight.device)
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for name, (rows, columns) in {one.name: one.shape for one in pieces}.items():
            own, first[name], count = name.split(".")[-2], count, count + rows
            self.a[own] = nn.Parameter(make(settings.rank, columns))
            self.b[own] = nn.Parameter(make(rows, settings.rank))
        for parameter in self.parameters():
            # Its gradient on a rank is a term of a sum over ranks, which Megatron computes for this mark.
            parameter.sequence_parallel = True
        # Rows without an adapter use an additional row of zeros.
        rows_of = torch.full((len(linear.weight),), count)
        for one in pieces:
            rows, self._columns = one.stored
            rows_of[one.region[0]] = first[one.name] + torch.arange(rows.start, rows.stop)
        self.register_buffer("_rows_of", rows_of.to(linear.weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[all] of the ranks that share the layer out: input -> a term of the output."""
        a = torch.cat(list(self.a.values()))[:, self._columns]
        b = F.pad(torch.block_diag(*self.b.values()), (0, 0, 0, 1))[self._rows_of]
        low = F.linear(x, a.to(x.dtype))
        if self._exchange and self._group.size() > 1:
            low = self._exchange(low, self._group)  # [all]
        return F.linear(low, b.to(x.dtype)) * self._scaling
