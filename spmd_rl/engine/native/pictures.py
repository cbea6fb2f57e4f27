"""Pictures in the native engine: features of the tower, kept by picture, and position ids of several axes.

    pictures = EnginePictures(module, processor)
    module(pictures.model_ids(ids), position_ids=pictures.positions(rows), **pictures.given(rows))

A forward has some tokens of each request, which may begin inside of a picture whose first blocks are cached.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.engine.native.scheduler import RunningSequence
from spmd_rl.model.pictures import Features, Processor, Tower
from spmd_rl.types import Request

KEPT_ROWS = 2**14
"""Features that are kept, one row for each token of a picture. Keys and values of the tokens are cached in any case."""


class EnginePictures:
    """Pictures of the requests of one engine."""

    def __init__(self, module: nn.Module, processor: Processor) -> None:
        self._processor, self._tower = processor, Tower(module, processor)
        self._device = next(module.parameters()).device
        self._kept: OrderedDict[bytes, Features] = OrderedDict()
        self.num_computed = 0
        """Number of pictures that the tower has computed."""

    def check(self, request: Request) -> None:
        """Raise a ValueError if the ids and pictures of a request do not match."""
        wanted = sum(map(self._processor.count, request.pictures))
        if (given := sum(id < 0 for id in request.prompt_ids)) != wanted:
            raise ValueError(f"request {request.id}: {given} ids of pictures that have {wanted}")

    def forget(self) -> None:
        """Drop the features, which belong to old weights."""
        self._kept.clear()

    def model_ids(self, ids: Tensor) -> Tensor:
        """Return the ids that the model knows."""
        return self._processor.model_ids(ids)

    def positions(self, rows: Sequence[RunningSequence], num_filled: int) -> Tensor | None:
        """Return the position ids of the rows' pending tokens, int64 [axes, 1, num_filled]; None: those of a text."""
        if self._processor.axes == 1 or not any(row.request.pictures for row in rows):
            return None
        found = torch.cat([self._pending(row) for row in rows], 1)
        return nn.functional.pad(found, (0, num_filled - found.shape[1]))[:, None].to(self._device)

    def _pending(self, row: RunningSequence) -> Tensor:
        if row.positions is None:
            row.positions = self._processor.positions(_ids(row.request), row.request.pictures)
        num_given, after = row.positions.shape[1], int(row.positions[:, -1].max()) + 1
        begin = max(row.num_stored, num_given)
        later = torch.arange(begin, row.num_tokens) + after - num_given
        return torch.cat([row.positions[:, row.num_stored :], later.expand(len(row.positions), -1)], 1)

    def given(self, rows: Sequence[RunningSequence]) -> dict[str, Any]:
        """Return the forward's keyword arguments for the pictures among the rows' pending tokens; empty: none."""
        parts, index, total = [], [], 0
        for row in rows:
            pending = torch.tensor(row.fed)
            places = (pending < 0) | (pending == self._processor.placeholder)
            known = pending[places] < 0
            # The pending ones are the last of the prompt's.
            num_last = int(known.sum())
            mine = [self._features(data) for data in row.request.pictures] if num_last else []
            total += sum(len(one.rows) for one in mine)
            numbers = torch.arange(total - num_last, total)
            index.append(torch.full(known.shape, -1).masked_scatter(known, numbers))
            parts += mine
        return self._tower.given(Features.joined(parts), torch.cat(index).to(self._device)) if parts else {}

    def _features(self, data: bytes) -> Features:
        if data not in self._kept:
            # Alone, so that its bits do not depend on other pictures.
            pixels = {name: tensor.to(self._device) for name, tensor in self._processor.batch([data]).items()}
            self._kept[data] = self._tower.features(pixels)
            self.num_computed += 1
        self._kept.move_to_end(data)
        while len(self._kept) > 1 and sum(len(one.rows) for one in self._kept.values()) > KEPT_ROWS:
            self._kept.popitem(last=False)
        return self._kept[data]


def _ids(request: Request) -> Tensor:
    return torch.tensor(request.prompt_ids, dtype=torch.int64)
