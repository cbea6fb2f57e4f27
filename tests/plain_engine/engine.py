"""An engine with transformers' own forward: one request and one token at a time, greedy, in float32."""

from array import array
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from spmd_rl.engine.base import Engine
from spmd_rl.model.build import build_model
from spmd_rl.model.stored import stored_parts
from spmd_rl.types import Completion, Request


class PlainEngine(Engine):
    """Greedy, in float32."""

    def __init__(self, path: str) -> None:
        """Of the model in the directory only the shape is taken."""
        self._model, self._requests, self._version = build_model(path, torch.float32, "cpu", attention="sdpa"), [], -1
        tensors = self._model.state_dict()
        parts = stored_parts(self._model)
        self._weights = {part.name: part.of(tensors[name]).zero_() for name in tensors for part in parts[name]}

    def add(self, request: Request) -> None:
        self._requests.append(request)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        request, ids, logprobs = self._requests.pop(), [], []
        for _ in range(request.max_new_tokens):
            logits = self._model(input_ids=torch.tensor([[*request.prompt_ids, *ids]])).logits[0, -1]
            best = torch.log_softmax(logits, -1).max(0)
            ids.append(int(best.indices))
            logprobs.append(float(best.values))
        versions = array("i", [self._version] * len(ids))
        return [Completion(request.id, array("i", ids), array("f", logprobs), versions, "length")]

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        found = {name: self._weights[name].copy_(tensor) for name, tensor in weights}
        assert found.keys() == self._weights.keys()
        self._version = version

    def loaded_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights.items()
