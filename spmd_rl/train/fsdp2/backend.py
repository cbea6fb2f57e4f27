"""The policy, or its frozen reference, on FSDP2: `FSDP2Policy` is a causal language model on `FSDP2Model`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.batch import Batch
from spmd_rl.config.schema import PolicyConfig, TrainConfig
from spmd_rl.devices import to_device
from spmd_rl.distributed import Layout
from spmd_rl.model.logprobs import TokenHead, logit_factor
from spmd_rl.train.accumulate import Policy
from spmd_rl.train.base import Ask
from spmd_rl.train.fsdp2.model import FSDP2Model
from spmd_rl.train.fsdp2.row import filled_up


class FSDP2Policy(FSDP2Model):
    """Gives logprob and entropy."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """[all] See `FSDP2Model`."""
        factor = logit_factor(model.config.get_text_config())
        model.set_output_embeddings(TokenHead(model.get_output_embeddings(), factor))
        super().__init__(model, *args, **kwargs)

    def outputs(self, micro: Batch, ask: Ask) -> tuple[Tensor, ...]:
        """See `FSDP2Model`."""
        row, head = self.row(micro), self.module.get_output_embeddings()
        head.targets = to_device(filled_up(micro.token_ids[row.targets]), self.device)
        head.temperature, head.survivors = ask.temperature, None
        if micro.survivors is not None:
            lists = micro.survivors.index_select(0, row.targets)
            head.survivors = tuple(to_device(part, self.device) for part in (lists.owners, lists.values.long()))
        return self.predictions(micro, row).unbind(-1)


def fsdp2_policy(
    model: nn.Module,
    layout: Layout,
    train: TrainConfig,
    dtype: torch.dtype,
    optimizer: PolicyConfig | None = None,
    total_updates: int = 1,
    load: Callable[[nn.Module], None] | None = None,
) -> Policy:
    """[all] See `FSDP2Model` and `TrainedRole`."""
    return Policy(FSDP2Policy(model, layout, train, dtype, optimizer, load), layout, train, optimizer, total_updates)
