"""The engine loop: requests of coroutines in, completions out, in one thread.

Each `poll` runs every ready coroutine, admits new requests (by priority, then (ticket, answer, turn)), and computes an
engine step. Verdicts arrive between steps, so scoring overlaps generation.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterable
from operator import attrgetter

from spmd_rl.distributed import World
from spmd_rl.engine.base import Engine
from spmd_rl.types import Completion, Request

IDLE_SECONDS = 0.005


class EngineLoop:
    """Requests of coroutines to a replica's engine."""

    def __init__(self, engine: Engine, world: World) -> None:
        self.idle_seconds = 0.0
        self._engine, self._world = engine, world
        self._new: list[Request] = []
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._woken = asyncio.Event()

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._futures)

    def generate(self, request: Request) -> Awaitable[Completion]:
        """Await the completion of a request; `finish_reason='abort'` if aborted."""
        assert request.id not in self._futures, f"request {request.id} is under way already"
        self._new.append(request)
        self.wake()
        future = self._futures[request.id] = asyncio.get_running_loop().create_future()
        return future

    def wake(self) -> None:
        """End the sleep of an idle loop."""
        self._woken.set()

    async def poll(self) -> None:
        """Run coroutines and an engine step; without requests, sleep until woken."""
        if not self._new and not self._engine.num_unfinished:
            await self._sleep()
            return
        await asyncio.sleep(0)
        self.admit()
        self._step()
        await asyncio.sleep(0)

    def admit(self) -> None:
        """Pass new requests to the engine."""
        for request in sorted(self._new, key=attrgetter("queue_key")):
            self._engine.add(request)
        self._new.clear()

    async def abort_all(self) -> int:
        """Abort all requests and return their number; coroutines get partial completions, new requests wait for the
        next poll.
        """
        num_stopped = len(self._futures)
        self._engine.abort([id for id in self._futures if id not in {request.id for request in self._new}])
        while len(self._futures) > len(self._new):
            self._step()
        self._world.journal.idle(False)
        await asyncio.sleep(0)
        return num_stopped

    def clear(self) -> None:
        """Forget requests whose coroutines were cancelled after `abort_all`."""
        assert len(self._new) == len(self._futures), "clear() with requests in the engine"
        self._new.clear()
        self._futures.clear()

    def _step(self) -> None:
        self._world.journal.idle(False)
        self._complete(self._engine.step())
        self._world.progress()

    def _complete(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            future = self._futures.pop(completion.id)
            # The coroutine may have been cancelled meanwhile; setting a result would raise.
            if not future.done():
                future.set_result(completion)

    async def _sleep(self) -> None:
        began = time.perf_counter()
        self._world.journal.idle(True)
        self._woken.clear()
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                await self._woken.wait()
        except TimeoutError:
            pass
        self.idle_seconds += time.perf_counter() - began
