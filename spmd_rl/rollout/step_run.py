"""`StepRun`: one step on one replica, from its first slice to its end, which it may leave once and come back to.

The loop: start slices while there is room, play them over the engine, report those whose verdicts are all in, until the
step has ended. Where slices come from, where they go and when the step has ended is a `StepSource`'s: the tickets that
all replicas share (`shared_step.py`).
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
"""The collective at which the replicas meet when they know the step's end."""

FLUSH_SECONDS = 0.01
"""Lets ZMQ send the last requests before this rank blocks."""


class Door(Protocol):
    """A replica's view of meetings with ranks that train, between two steps of its engine."""

    def poll(self) -> bool:
        """Return whether a meeting waits for this replica."""
        ...

    async def enter(self) -> None:
        """Take part in it; requests that it takes out of the engine go on after it."""
        ...


class StepSource(SliceClaim, Protocol):
    """Where the slices of a step come from, when it has ended, and where finished slices go."""

    def ended(self) -> bool:
        """Return whether the step has ended, as far as this replica knows."""
        ...

    def finish(self, group_slice: GroupSlice, group: Group, run: "StepRun") -> None:
        """Take a slice whose verdicts are all in."""
        ...


class Counters(NamedTuple):
    """What a replica counts while its engine is driven: since it was made, or between two moments."""

    idle_seconds: float = 0.0
    """In which the engine had nothing to compute."""
    seconds: float = 0.0
    asked: int = 0
    """See `EngineCounts`; so the others."""
    cached: int = 0
    verified: int = 0
    accepted: int = 0

    def plus(self, later: "Counters", since: "Counters") -> "Counters":
        """Return these counters and what was counted from `since` to `later`."""
        return Counters(*(own + end - begin for own, end, begin in zip(self, later, since, strict=True)))


class StepRun:
    """What a replica does for one step, and what that has cost it so far."""

    def __init__(self, number: int, source: StepSource, player: Player, door: Door | None = None) -> None:
        """door: of a replica that generates while others train."""
        self.number, self.source = number, source
        self.num_stopped = 0
        """Requests that the step's end stopped."""
        self._player, self._door = player, door
        self._spent = Counters()
        """What the step had cost when its engine was driven last."""
        self._driven_from: Counters | None = None
        self._paused_at: float | None = None
        """By `time.perf_counter`, where it started ahead of its step."""
        self._paused_seconds = self._idle_ahead = 0.0

    def costs(self) -> tuple[float, float, tuple[int, ...]]:
        """Return what the step has cost this replica so far.

        These are the seconds in which the engine had nothing to compute, those at work with waits for verdicts, and
        `EngineCounts`.
        """
        spent = self._spent
        if self._driven_from is not None:
            spent = spent.plus(self._counters(), since=self._driven_from)
        return spent.idle_seconds, spent.seconds, spent[2:]

    def _counters(self) -> Counters:
        counts = astuple(self._player.engine.token_counts)
        return Counters(self._player.engine_loop.idle_seconds, time.perf_counter(), *counts)

    def pause(self) -> None:
        """Turn to other work, while verdicts and replies of environments come in; the engine holds nothing."""
        self._paused_at, self._idle_ahead = time.perf_counter(), self._spent.idle_seconds

    def resume(self) -> None:
        """Go on with it, whether it was paused or has just started."""
        if self._paused_at is not None:
            self._paused_seconds = time.perf_counter() - self._paused_at

    def pace(self, lags: np.ndarray, world: World) -> dict[str, float]:
        """[all] Return how well waiting was hidden, and `lags`, of all answers; nothing where it never was paused."""
        if self._paused_at is None:  # alike on all ranks
            return {}
        seconds = {
            "placement/overlap_seconds": self._paused_seconds,
            "placement/overlap_wait_seconds": self._spent.idle_seconds - self._idle_ahead,
        }
        return {**world.reduce("generate: overlap", seconds, "max"), "rollout/lag/max": float(lags.max(initial=0))}

    @contextmanager
    def driven(self) -> Iterator[None]:
        """[all] ranks of the replica: drive its engine; what is spent inside is this step's."""
        with self._player.engine.driven(), self.counted():
            yield

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count time and tokens inside for this step."""
        self._driven_from = self._counters()
        yield
        self._spent, self._driven_from = self._spent.plus(self._counters(), since=self._driven_from), None

    async def until_end(self) -> None:
        """Play slices until the step has ended."""
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
        if not (self._door and player.carries):  # else the engine goes on with what is carried
            self.num_stopped = await player.end_step()

    async def until_idle(self) -> None:
        """Play slices until the engine has nothing to compute, or the step has ended."""
        player, source = self._player, self.source
        await player.start_slices(source.ahead)
        while not source.ended() and not await player.engine_is_idle():
            await player.engine_loop.poll()
            self._report_finished()
            await player.start_slices(source.ahead)
        await player.engine_loop.abort_all()  # surplus, where the step has ended
        await asyncio.sleep(FLUSH_SECONDS)

    def _has_news(self) -> bool:
        return self.source.ended() or (self._door is not None and self._door.poll())

    def _report_finished(self) -> None:
        for group_slice, group in self._player.finished():
            self.source.finish(group_slice, group, self)
