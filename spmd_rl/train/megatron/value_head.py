"""A critic on Megatron: value head instead of output embedding."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from spmd_rl.model.differentiable import collect
from spmd_rl.train.megatron.mapping import Rule, Whole
from spmd_rl.train.megatron.parameters import OUTPUT

LAYER = OUTPUT.removesuffix("weight")


class ValueHead(nn.Module):
    """Value head, whole on every rank; each computes its tokens."""

    gives_fingerprint = False

    def __init__(self, config: TransformerConfig, has_bias: bool, groups: ProcessGroupCollection) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        how = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, **how))
        self.bias = nn.Parameter(torch.empty(1, **how)) if has_bias else None
        for parameter in self.parameters():
            # Its gradient on a rank is a term of a sum over ranks, which Megatron computes for this mark.
            parameter.sequence_parallel = config.sequence_parallel
        self._group = groups.tp
        self.keep: Tensor | None = None
        """Tokens to compute, as `transformer.Head.keep`"""

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """[all] of the ranks that share a row's tokens out: [t / tp, 1, h] -> float32 [n, 1, 1]."""
        hidden = hidden[:, 0]
        if self.gives_fingerprint:
            values = hidden.float().sum(-1, keepdim=True) / hidden.shape[-1] ** 0.5
        else:
            values = F.linear(hidden, self.weight, self.bias).float()
        if (size := self._group.size()) > 1:
            here = torch.arange(len(values), device=values.device) + self._group.rank() * len(values)
            values = collect(values, here, size * len(values), self._group)  # [all]
        return values[self.keep][:, None], None


def rules_with(names: Mapping[str, Rule], head: Collection[str]) -> dict[str, Rule]:
    """Return an architecture's rules with those of a value head named `head`."""
    own = {f"{LAYER}{name.rpartition('.')[2]}": Whole(name) for name in head}
    return {name: rule for name, rule in names.items() if name != OUTPUT} | own
