"""A critic's model: a causal language model whose output embedding gives one number a token."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.model.load import Region, WeightFiles

SCORE = "score.weight"
"""The head of a reward model as transformers stores it"""


def with_value_head(model: nn.Module, bias: bool = True) -> nn.Module:
    """The causal language model with a value head as its output embedding, in place: [.., hidden] -> [.., 1].

    The head starts at 0, so that the first advantages are plain returns, and nothing random is drawn.
    """
    embedding = model.get_output_embeddings().weight
    head = _ValueHead(embedding.shape[1], 1, bias, device=embedding.device, dtype=embedding.dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    model.set_output_embeddings(head)
    return model


def head_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model's value head by name: no language model that is stored has them."""
    own = [*model.get_output_embeddings().parameters()]
    return {name: p for name, p in model.named_parameters() if any(p is one for one in own)}


class ValueHeadFiles:
    """The files of a language model with a value head in the place of its output embedding: of zeros, or that of a
    reward model."""

    def __init__(self, files: WeightFiles, head: dict[str, nn.Parameter]) -> None:
        """head: see `head_weights`; by the names under which it is stored. UserError if several outputs are stored."""
        self.folder, self.head, self._files = files.folder, head, files
        self._scores = {name: SCORE for name in head if name.endswith("weight") and SCORE in files.names}
        self._zeros = head.keys() - self._scores.keys()
        if self._scores and (outputs := files.shape(SCORE)[0]) != 1:
            raise UserError(f"critic.model: {files.folder} has {outputs} outputs; a reward model has one")
        self.names: Collection[str] = {*files.names, *head} - {*self._scores.values()}

    @property
    def bytes_read(self) -> int:
        """See `WeightFiles`."""
        return self._files.bytes_read

    def file_of(self, name: str) -> Path:
        """See `WeightFiles`."""
        return self._files.file_of(self._scores.get(name, name))

    def shape(self, name: str) -> list[int]:
        """See `WeightFiles`."""
        return list(self.head[name].shape) if name in self._zeros else self._files.shape(self._scores.get(name, name))

    @torch.no_grad()
    def fill(self, model: nn.Module, bias: bool) -> nn.Module:
        """Give a model that is whole its value head, in place."""
        for name, p in head_weights(with_value_head(model, bias)).items():
            p.copy_(self.read(name, tuple(slice(0, size) for size in p.shape)))
        return model

    def read(self, name: str, region: Region) -> Tensor:
        """See `WeightFiles`."""
        if name in self._zeros:
            return torch.zeros([piece.stop - piece.start for piece in region])
        return self._files.read(self._scores.get(name, name), region)


class _ValueHead(nn.Linear):
    gives_fingerprint = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gives_fingerprint:
            return hidden.float().sum(-1, keepdim=True) / hidden.shape[-1] ** 0.5
        return super().forward(hidden).clone()  # a view, which a product with three dimensions is, would make FSDP warn
