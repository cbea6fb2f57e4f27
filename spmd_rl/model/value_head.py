"""A critic's model: a causal LM whose output embedding returns a number per token."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from spmd_rl.base.errors import UserError
from spmd_rl.model.load import Region, WeightFiles

SCORE = "score.weight"
"""Name of a reward model's head in transformers"""


def with_value_head(model: nn.Module, bias: bool = True) -> nn.Module:
    """Replace the output embedding, in place, with a value head: [.., hidden] -> [.., 1]."""
    # The head starts at 0, so that the first advantages are plain returns, without random numbers.
    embedding = model.get_output_embeddings().weight
    head = _ValueHead(embedding.shape[1], 1, bias, device=embedding.device, dtype=embedding.dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    model.set_output_embeddings(head)
    return model


def head_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the value head's parameters by name."""
    own = [*model.get_output_embeddings().parameters()]
    return {name: p for name, p in model.named_parameters() if any(p is one for one in own)}


class ValueHeadFiles:
    """A language model's files plus a value head: zeros, or a stored reward model's."""

    def __init__(self, files: WeightFiles, head: dict[str, nn.Parameter]) -> None:
        """head: see `head_weights`. UserError if several outputs are stored."""
        self.folder, self.head, self._files = files.folder, head, files
        self._scores = {name: SCORE for name in head if name.endswith("weight") and SCORE in files.names}
        self._zeros = head.keys() - self._scores.keys()
        if self._scores and (outputs := files.shape(SCORE)[0]) != 1:
            raise UserError(f"critic.model: {files.folder} has {outputs} outputs; a reward model has one")
        self.names: Collection[str] = {*files.names, *head} - {*self._scores.values()}

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, see `WeightFiles`."""
        return self._files.bytes_read

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor, see `WeightFiles`."""
        return self._files.file_of(self._scores.get(name, name))

    def shape(self, name: str) -> list[int]:
        """Return a tensor's whole shape, see `WeightFiles`."""
        return list(self.head[name].shape) if name in self._zeros else self._files.shape(self._scores.get(name, name))

    @torch.no_grad()
    def fill(self, model: nn.Module, bias: bool) -> nn.Module:
        """Replace a whole model's output embedding with its value head."""
        for name, p in head_weights(with_value_head(model, bias)).items():
            p.copy_(self.read(name, tuple(slice(0, size) for size in p.shape)))
        return model

    def read(self, name: str, region: Region) -> Tensor:
        """Return a region of a tensor, see `WeightFiles`."""
        if name in self._zeros:
            return torch.zeros([piece.stop - piece.start for piece in region])
        return self._files.read(self._scores.get(name, name), region)


class _ValueHead(nn.Linear):
    gives_fingerprint = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gives_fingerprint:
            return hidden.float().sum(-1, keepdim=True) / hidden.shape[-1] ** 0.5
        # FSDP warns about a view as a module's output, which a product of three dimensions is.
        return super().forward(hidden).clone()
