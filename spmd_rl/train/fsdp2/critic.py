"""The critic on FSDP2: a language model whose vocabulary's projection is replaced by one number, on `FSDP2Model`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from spmd_rl.batch import Batch
from spmd_rl.config.schema import CriticConfig, TrainConfig
from spmd_rl.distributed import Layout
from spmd_rl.train.accumulate import Critic
from spmd_rl.train.base import Ask
from spmd_rl.train.fsdp2.model import FSDP2Model


class FSDP2Value(FSDP2Model):
    """Gives the value of what stands before each token."""

    def outputs(self, micro: Batch, ask: Ask) -> tuple[Tensor, ...]:
        """See `FSDP2Model`."""
        self.module.get_output_embeddings().is_probed = ask.is_probe
        return (self.predictions(micro, self.row(micro))[:, 0].float(),)


def fsdp2_critic(
    model: nn.Module,
    layout: Layout,
    train: TrainConfig,
    dtype: torch.dtype,
    optimizer: CriticConfig,
    total_updates: int = 1,
    load: Callable[[nn.Module], None] | None = None,
) -> Critic:
    """[all] See `FSDP2Model` and `TrainedRole`; `model` has a value head."""
    return Critic(FSDP2Value(model, layout, train, dtype, optimizer, load), layout, train, optimizer, total_updates)


def with_value_head(model: nn.Module) -> nn.Module:
    """The causal language model with a value head as its output embedding, in place: [.., hidden] -> [.., 1].

    The head starts at 0, so that the first advantages are plain returns, and nothing random is drawn.
    """
    embedding = model.get_output_embeddings().weight
    head = _ValueHead(embedding.shape[1], 1, device=embedding.device, dtype=embedding.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.set_output_embeddings(head)
    return model


class _ValueHead(nn.Linear):
    is_probed = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.is_probed:
            return hidden.float().sum(-1, keepdim=True) / hidden.shape[-1] ** 0.5
        return super().forward(hidden).clone()  # a view, which a product with three dimensions is, would make FSDP warn
