"""States of running requests, for the layers of a hybrid model that carry one (`model/hybrid.py`)."""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.engine.native.scheduler import RunningSequence
from spmd_rl.model.hybrid import Call, LayerState


class CarriedStates:
    """Division of a forward's tokens among requests, each with its own state."""

    def __init__(self, rows: Sequence[RunningSequence], together: bool) -> None:
        """rows: in order of tokens; those with equally many pending ones are neighbours, and computed in one call if
        `together`."""
        # The bits of a convolution on a CPU change with the number of rows.
        key = (lambda row: (row.num_fed, row.num_stored > 0)) if together else (lambda row: row.request.id)
        self._groups = [list(run) for _, run in groupby(rows, key)]

    def mix(self, call: Call, layer: int, hidden: Tensor) -> Tensor:
        """Return the layer's outputs for fed tokens and padding, [1, T, H]; keep new states."""
        found, begin = [], 0
        for rows in self._groups:
            end = begin + rows[0].num_fed * len(rows)
            state = LayerState.joined([row.states[layer] for row in rows if row.num_stored > 0])
            out = call(hidden[0, begin:end].unflatten(0, (len(rows), -1)), state)
            found.append(out.flatten(0, 1))
            for number, row in enumerate(rows):
                row.states[layer] = tuple(None if x is None else x[number : number + 1] for x in state.tensors)
            begin = end
        return F.pad(torch.cat(found), (0, 0, 0, hidden.shape[1] - begin))[None]
