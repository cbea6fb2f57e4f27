"""The pump: runs coroutines beside `Engine.step()`, in one thread, on the replica's rank.

A coroutine that awaits `generate` sleeps until its request has ended; thousands may. Each turn of the pump lets every
ready coroutine run, admits new requests in (ticket, answer, turn) order, and computes one engine step. Verdicts arrive
between steps, so scoring overlaps generation.

Left out: what a rollout is (`context.py`) and which ones to start (`rollouts.py`).
"""

import asyncio
import time
from collections.abc import Iterable

from spmd_rl.dist import World
from spmd_rl.engine.base import Engine
from spmd_rl.types import Completion, Request

IDLE_SECONDS, MAX_IDLE_SECONDS = 0.001, 0.005
"""How long an idle pump sleeps, at first and in the end, before it looks again at the store and the verdicts."""


class Pump:
    """Requests of coroutines on one side, an engine on the other."""

    def __init__(self, engine: Engine, world: World) -> None:
        self.idle_seconds = 0.0
        """Time in which the engine had nothing to do; the caller resets it."""
        self._engine, self._world = engine, world
        self._nap = IDLE_SECONDS
        self._ready: list[Request] = []
        self._futures: dict[str, asyncio.Future[Completion]] = {}

    @property
    def num_requests(self) -> int:
        """Requests asked for and not ended."""
        return len(self._futures)

    async def generate(self, request: Request) -> Completion:
        """Wait for the request's completion; an aborted one has `finish_reason='abort'`."""
        assert request.id not in self._futures, f"request {request.id} is under way already"
        self._ready.append(request)
        self._futures[request.id] = asyncio.get_running_loop().create_future()
        return await self._futures[request.id]

    async def turn(self) -> None:
        """Let coroutines run, then compute one engine step, or sleep a moment if there is nothing to compute."""
        await asyncio.sleep(0)
        for request in sorted(self._ready, key=lambda r: r.order):
            self._engine.add(request)
        self._ready.clear()
        if self._engine.num_unfinished:
            self._deliver(self._engine.step())
            self._world.progress()
            self._nap = IDLE_SECONDS
            await asyncio.sleep(0)
            return
        began = time.perf_counter()
        await asyncio.sleep(self._nap)
        self._nap = min(2 * self._nap, MAX_IDLE_SECONDS)
        self.idle_seconds += time.perf_counter() - began

    def _deliver(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            future = self._futures.pop(completion.id)
            if not future.done():  # its coroutine was cancelled
                future.set_result(completion)

    def abort_all(self) -> int:
        """Empty the engine; every waiting coroutine gets what it has. Returns the number of requests aborted."""
        num_aborted = len(self._futures)
        self._engine.abort([id for id in self._futures if id not in {r.id for r in self._ready}])
        for request in self._ready:
            self._futures.pop(request.id).cancel()
        self._ready.clear()
        while self._engine.num_unfinished:
            self._deliver(self._engine.step())
        assert not self._futures
        return num_aborted
