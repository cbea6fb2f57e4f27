"""`FSDP2Backend`: the policy, or its frozen reference: a causal language model on `FSDP2Role`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from spmd_rl.batch import Batch
from spmd_rl.devices import to_device
from spmd_rl.model.logprobs import TokenHead, logit_factor
from spmd_rl.model.stored import stored_parts
from spmd_rl.train.base import Loss, Metrics
from spmd_rl.train.fsdp2 import shard
from spmd_rl.train.fsdp2.gather import Gather
from spmd_rl.train.fsdp2.role import FSDP2Role
from spmd_rl.train.fsdp2.row import filled_up


class FSDP2Backend(FSDP2Role):
    """See `train.base.TrainBackend`."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """[all] See `FSDP2Role`."""
        self._parts = stored_parts(model)
        factor = logit_factor(model.config.get_text_config())
        model.set_output_embeddings(TokenHead(model.get_output_embeddings(), factor))
        super().__init__(model, *args, **kwargs)
        self._head = model.get_output_embeddings()  # of another pipeline stage there is nothing left
        self._gather: Gather | None = None

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """See `TrainBackend`."""
        logprobs, entropy = self._evaluate("logprobs", batch, partial(self._forward, temperature=temperature), 2)
        return logprobs, entropy

    def probe(self, batch: Batch) -> Tensor:
        """See `Role`."""
        return self.logprobs(batch, 1.0)[0]

    def update(self, batch: Batch, loss: Loss, temperature: float) -> Metrics:
        """See `TrainBackend`."""
        return self._update(batch, partial(self._forward, temperature=temperature), loss)

    def _forward(self, micro: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """[all] Logprob and entropy at each token of the loss mask: float32 [N] each."""
        row = self._row(micro)
        self._head.targets = to_device(filled_up(micro.token_ids[row.targets]), self._world.device)
        self._head.temperature = temperature
        self._head.candidate_ids = None
        if micro.candidate_ids is not None:
            lists = micro.candidate_ids.index_select(0, row.targets)
            self._head.candidate_ids = tuple(
                to_device(part, self._world.device) for part in (lists.owners, lists.values.long())
            )
        logprobs, entropy = self._outputs(micro, row).unbind(-1)
        return logprobs, entropy

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainBackend`: bitwise what the forward pass computes with."""
        for name, tensor in self.whole_parameters():  # [all]
            yield from ((part.name, part.of(tensor)) for part in self._parts[name])
        for name, buffer in self._model.named_buffers():
            yield from ((part.name, part.of(buffer)) for part in self._parts.get(name, ()))

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """[all] The same by parameters, of which some are stored in parts: those of the whole model, whole."""
        shard.reshard(self._model)
        parameters = dict(self._model.named_parameters())
        if self._gather is None:
            self._gather = Gather(parameters, self._dtype, self.layout)  # [all] like this whole method
        own = self._gather.whole(parameters)
        for name, tensor in self._pipeline.of_owners(own, self._dtype):
            self._world.progress()
            yield name, tensor
