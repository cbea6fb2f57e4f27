"""`StepRun`: one step on one replica, from its first slice to its end; it can be paused once.

The loop starts slices while there is room, plays them on the engine, and reports those with all verdicts to a
`StepSource`.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import NamedTuple, Protocol

import numpy as np

from spmd_rl.distributed import World
from spmd_rl.rollout.claims import SliceClaim
from spmd_rl.rollout.player import Player
from spmd_rl.rollout.step_plan import GroupSlice
from spmd_rl.types import Group

END = "generate: end of step"
"""Collective at the end of a step."""

FLUSH_SECONDS = 0.01
"""Time for ZMQ to send the last requests before this rank blocks."""


class Door(Protocol):
    """A replica's meetings with trainer ranks between engine steps: samples out, weights in."""

    def poll(self) -> bool:
        """Return True if a meeting waits for this replica."""
        ...

    async def enter(self) -> None:
        """Take part in it; requests removed from the engine continue afterwards."""
        ...


class StepSource(SliceClaim, Protocol):
    """Source of a step's slices and of its end, and sink of finished slices."""

    def ended(self) -> bool:
        """Return True if this replica knows of the step's end."""
        ...

    def finish(self, group_slice: GroupSlice, group: Group, run: "StepRun") -> None:
        """Take a slice with all its verdicts."""
        ...


class Counters(NamedTuple):
    """Counters of a replica while its engine is driven."""

    idle_seconds: float = 0.0
    seconds: float = 0.0
    asked: int = 0
    """Like the next three, see `EngineCounts`."""
    cached: int = 0
    verified: int = 0
    accepted: int = 0

    def plus(self, later: "Counters", since: "Counters") -> "Counters":
        """Return these counters plus `later` - `since`."""
        return Counters(*(own + end - begin for own, end, begin in zip(self, later, since, strict=True)))


class StepRun:
    """One replica's work on a step, and its cost."""

    def __init__(self, number: int, source: StepSource, player: Player, door: Door | None = None) -> None:
        """door: of a replica that generates while others train."""
        self.number, self.source = number, source
        self.num_stopped = 0
        self._player, self._door = player, door
        self._spent = Counters()
        """Cost until the engine was last released."""
        self._driven_from: Counters | None = None
        self._paused_at: float | None = None
        self._paused_seconds = self._idle_ahead = 0.0

    def costs(self) -> tuple[float, float, tuple[int, ...]]:
        """Return the idle seconds of the engine, seconds including waits for verdicts, and `EngineCounts`."""
        spent = self._spent
        if self._driven_from is not None:
            spent = spent.plus(self._counters(), since=self._driven_from)
        return spent.idle_seconds, spent.seconds, spent[2:]

    def _counters(self) -> Counters:
        counts = astuple(self._player.engine.token_counts)
        return Counters(self._player.engine_loop.idle_seconds, time.perf_counter(), *counts)

    def pause(self) -> None:
        """Pause the step, with an empty engine; verdicts still come in."""
        self._paused_at, self._idle_ahead = time.perf_counter(), self._spent.idle_seconds

    def resume(self) -> None:
        """Continue after a pause, or begin."""
        if self._paused_at is not None:
            self._paused_seconds = time.perf_counter() - self._paused_at

    def pace(self, lags: np.ndarray, world: World) -> dict[str, float]:
        """[all] Return metrics of the waiting that an update overlapped, and of `lags`; empty unless the step was
        paused.
        """
        if self._paused_at is None:  # alike on all ranks
            return {}
        seconds = {
            "placement/overlap_seconds": self._paused_seconds,
            "placement/overlap_wait_seconds": self._spent.idle_seconds - self._idle_ahead,
        }
        return {**world.reduce("generate: overlap", seconds, "max"), "rollout/lag/max": float(lags.max(initial=0))}

    @contextmanager
    def driven(self) -> Iterator[None]:
        """[all] ranks of the replica: drive its engine, and count the cost."""
        with self._player.engine.driven(), self.counted():
            yield

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count time and tokens inside for this step."""
        self._driven_from = self._counters()
        yield
        self._spent, self._driven_from = self._spent.plus(self._counters(), since=self._driven_from), None

    async def until_end(self) -> None:
        """Play slices until the step's end."""
        player, source = self._player, self.source
        while True:
            with player.waiting(END):
                if source.ended():
                    break
                if self._door and self._door.poll():
                    await self._door.enter()
                await player.start_slices(source.next)
            with player.waiting(END):
                await player.poll(self._has_news)
            self._report_finished()
        # With a door, the engine continues carried requests while the trainers update: it must not be emptied.
        if not (self._door and player.carries):
            self.num_stopped = await player.end_step()

    async def until_idle(self) -> None:
        """Play slices until the engine is idle or the step has ended."""
        player, source = self._player, self.source
        await player.start_slices(source.ahead)
        while not source.ended() and not await player.engine_is_idle():
            await player.engine_loop.poll()
            self._report_finished()
            await player.start_slices(source.ahead)
        # If the step has ended meanwhile, what still runs is surplus.
        await player.engine_loop.abort_all()
        await asyncio.sleep(FLUSH_SECONDS)

    def _has_news(self) -> bool:
        return self.source.ended() or (self._door is not None and self._door.poll())

    def _report_finished(self) -> None:
        for group_slice, group in self._player.finished():
            self.source.finish(group_slice, group, self)
