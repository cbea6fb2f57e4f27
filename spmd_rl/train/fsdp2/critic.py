"""`FSDP2Critic`: a language model whose vocabulary's projection is replaced by one number, on `FSDP2Role`."""

from torch import Tensor, nn

from spmd_rl.batch import Batch
from spmd_rl.train.base import Metrics, ValueLoss
from spmd_rl.train.fsdp2.role import FSDP2Role


class FSDP2Critic(FSDP2Role):
    """See `train.base.CriticBackend`."""

    def values(self, batch: Batch) -> Tensor:
        """See `CriticBackend`."""
        return self._evaluate("values", batch, self._forward, 1)[0]

    def probe(self, batch: Batch) -> Tensor:
        """See `Role`."""
        head = self._model.get_output_embeddings()
        head.is_probed = True
        values = self.values(batch)
        head.is_probed = False
        return values

    def update(self, batch: Batch, loss: ValueLoss) -> Metrics:
        """See `CriticBackend`."""
        return self._update(batch, self._forward, loss)

    def _forward(self, micro: Batch) -> tuple[Tensor]:
        """[all] The value of what stands before each token of the loss mask: float32 [N]."""
        return (self._outputs(micro, self._row(micro))[:, 0].float(),)


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
