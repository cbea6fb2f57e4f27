"""Rows on their way between ranks: through memory that all of them see, or over gloo.

    rows = Rows(world, group, traffic, journal)
    arrived = rows.exchange("prepare: samples", mine, counts, plan)  # [all]

On one machine each rank lays what it sends into its own part of a shared window; all meet, and each reads what is its
own: no socket, no thread, and the meeting is the one in which they agree on who sends what. Elsewhere an all-to-all
comes after it.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.distributed.journal import Journal
from spmd_rl.distributed.traffic import Traffic
from spmd_rl.distributed.window import Ranks, SharedWindow

LEAST = 2**16
"""Bytes of a rank's part of a half of the window, at the fewest."""
LIMIT = 2**30
"""Bytes of the window, beyond which rows go over gloo."""


class Rows:
    """The way of a world's rows; the window grows as it is needed."""

    def __init__(self, world: Ranks, group: dist.ProcessGroup | None, traffic: Traffic, journal: Journal) -> None:
        """`group`: gloo over all ranks; None at size 1."""
        self._world, self._group, self._traffic, self._journal = world, group, traffic, journal
        self._halves: list[np.ndarray] = []
        """uint8 [size, room]: a part for each rank"""
        self._room = 0
        self._turn = 0

    def exchange(self, name: str, rows: Tensor, counts: np.ndarray, agreed: Any) -> Tensor:
        """[all] See `World.exchange`."""
        world, width = self._world, rows.shape[1]
        sizes = counts * width
        need = int(sizes.sum(1).max())
        whole = len(rows) == counts[world.rank].sum()
        fits = bool(self._halves) and need <= self._room
        if fits and whole:
            self._write(rows)  # in this rank's own part, whatever the others believe
        world.agree(name, [sizes, agreed])  # [all]
        assert whole, "other rows than was agreed"
        self._traffic.meeting_bytes += rows.nbytes
        if world.size == 1:
            return rows
        if not fits and self._grow(world.size, need):  # [all]
            fits = True
            self._write(rows)
            world.barrier(f"{name}: in a larger window")  # [all]
        return self._read(sizes, width) if fits else self._over_gloo(name, rows, counts)  # [all]

    def _grow(self, size: int, need: int) -> bool:
        """[all] Make room for `need` bytes of each rank, and for more: steps differ. False if there is none."""
        room = max(LEAST, 1 << need.bit_length())
        window = SharedWindow.open(self._world, size * room, host=True) if 2 * size * room <= LIMIT else None  # [all]
        if window is not None:
            self._halves, self._room = [window.half(turn).numpy().reshape(size, room) for turn in range(2)], room
        return window is not None

    def _write(self, rows: Tensor) -> None:
        """This rank's rows, by the rank that they go to."""
        self._turn += 1
        self._halves[self._turn % 2][self._world.rank, : rows.nbytes] = rows.numpy().reshape(-1)

    def _read(self, sizes: np.ndarray, width: int) -> Tensor:
        """A copy of what all ranks have written for this one."""
        rank = self._world.rank
        begins = sizes[:, :rank].sum(1)
        bounds = zip(begins.tolist(), (begins + sizes[:, rank]).tolist(), strict=True)
        parts = [part[begin:end] for part, (begin, end) in zip(self._halves[self._turn % 2], bounds, strict=True)]
        return torch.from_numpy(np.concatenate(parts).reshape(-1, width))

    def _over_gloo(self, name: str, rows: Tensor, counts: np.ndarray) -> Tensor:
        """[all] An all-to-all."""
        rank = self._world.rank
        sent, received = counts[rank].tolist(), counts[:, rank].tolist()
        self._traffic.meetings += 1
        with self._journal.collective(f"{name}: rows"):
            arrived = rows.new_empty(sum(received), rows.shape[1])
            dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self._group)
            return arrived
