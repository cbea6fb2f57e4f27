"""Pictures in the native engine: features of the tower, kept by picture, and position ids of several axes.

    pictures = EnginePictures(module.tower, device)
    module(pictures.model_ids(ids), position_ids=pictures.positions(rows), **pictures.given(rows))

A forward has some tokens of each request, which may begin inside of a picture whose first blocks are cached.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.engine.native.scheduler import RunningSequence
from spmd_rl.model.pictures import Features, Tower
from spmd_rl.types import Request

KEPT_ROWS = 2**14
"""Features that are kept, one row for each token of a picture. Keys and values of the tokens are cached in any case."""


class EnginePictures:
    """Pictures of the requests of one engine."""

    def __init__(self, tower: Tower, device: torch.device) -> None:
        self.processor, self._tower, self._device = tower.processor, tower, device
        self._kept: OrderedDict[bytes, Features] = OrderedDict()

    def forget(self) -> None:
        """Drop the features, which belong to old weights."""
        self._kept.clear()

    def model_ids(self, ids: Tensor) -> Tensor:
        """Return the ids that the model knows."""
        return self.processor.model_ids(ids)

    def positions(self, rows: Sequence[RunningSequence], num_filled: int) -> Tensor | None:
        """Return the position ids of the rows' pending tokens, int64 [axes, 1, num_filled]; None: those of a text."""
        if self.processor.axes == 1 or not any(row.request.pictures for row in rows):
            return None
        found = torch.cat([self._pending(row) for row in rows], 1)
        return F.pad(found, (0, num_filled - found.shape[1]))[:, None].to(self._device)

    def _pending(self, row: RunningSequence) -> Tensor:
        if row.positions is None:
            row.positions = self.processor.positions(_ids(row.request), row.request.pictures)
        num_given, after = row.positions.shape[1], int(row.positions[:, -1].max()) + 1
        begin = max(row.num_stored, num_given)
        later = torch.arange(begin, row.num_tokens) + after - num_given
        return torch.cat([row.positions[:, row.num_stored :], later.expand(len(row.positions), -1)], 1)

    def given(self, rows: Sequence[RunningSequence]) -> dict[str, Any]:
        """Return the forward's keyword arguments for the pictures among the rows' pending tokens; empty: none."""
        if not any(row.request.pictures and row.num_stored < len(row.request.prompt_ids) for row in rows):
            return {}
        parts: list[Features] = []
        index, total = [], 0
        for row in rows:
            pending = torch.tensor(row.fed)
            known = pending[self.processor.is_placeholder(pending)] < 0
            # The pending ones are the last of the prompt's.
            num_last = int(known.sum())
            mine = self._last(row.request.pictures, num_last)
            total += sum(len(one.rows) for one in mine)
            index.append(torch.full(known.shape, -1).masked_scatter(known, torch.arange(total - num_last, total)))
            parts += mine
        return self._tower.given(Features.joined(parts), torch.cat(index).to(self._device)) if parts else {}

    def _last(self, pictures: Sequence[bytes], num_rows: int) -> list[Features]:
        """Return the features of the last pictures, as many as have these rows."""
        found: list[Features] = []
        for data in reversed(pictures):
            if num_rows <= 0:
                break
            found.append(self._features(data))
            num_rows -= len(found[-1].rows)
        return found[::-1]

    def _features(self, data: bytes) -> Features:
        if data not in self._kept:
            # Alone, so that its bits do not depend on other pictures.
            pixels = {name: tensor.to(self._device) for name, tensor in self.processor.batch([data]).items()}
            self._kept[data] = self._tower.features(pixels)
        self._kept.move_to_end(data)
        while len(self._kept) > 1 and sum(len(one.rows) for one in self._kept.values()) > KEPT_ROWS:
            self._kept.popitem(last=False)
        return self._kept[data]


def _ids(request: Request) -> Tensor:
    return torch.tensor(request.prompt_ids, dtype=torch.int64)
