"""The pump: runs coroutines beside engine steps, in one thread, on the replica's first rank.

A coroutine that awaits `generate` sleeps until its request has ended; thousands may. Each turn of the pump lets every
ready coroutine run, admits new requests in (ticket, answer, turn) order, and computes engine steps. Verdicts arrive
between steps, so scoring overlaps generation.

Left out: what a rollout is (`context.py`), which ones to start (`rollouts.py`) and the replica's other ranks
(`replica.py`).
"""

import asyncio
import time
from collections.abc import Awaitable, Iterable
from operator import attrgetter

from spmd_rl.rollout.replica import Replica
from spmd_rl.types import Completion, Request

IDLE_SECONDS, MAX_IDLE_SECONDS = 0.001, 0.005
"""How long an idle pump sleeps, at first and in the end, unless a coroutine asks for an answer."""


class Pump:
    """Requests of coroutines on one side, a replica's engine on the other."""

    def __init__(self, replica: Replica) -> None:
        self.idle_seconds = 0.0
        """Time in which the engine had nothing to do; the caller resets it."""
        self._replica = replica
        self._nap = IDLE_SECONDS
        self._ready: list[Request] = []
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._napping: asyncio.Future[None] | None = None

    @property
    def num_requests(self) -> int:
        """Requests asked for and not ended."""
        return len(self._futures)

    def generate(self, request: Request) -> Awaitable[Completion]:
        """Await the request's completion; an aborted one has `finish_reason='abort'`."""
        assert request.id not in self._futures, f"request {request.id} is under way already"
        self._ready.append(request)
        self._wake()
        future = self._futures[request.id] = asyncio.get_running_loop().create_future()
        return future

    async def turn(self) -> None:
        """Let coroutines run, then compute engine steps; with nothing to compute, sleep until asked, or a moment."""
        if not self._ready and not self._replica.num_unfinished:
            await self._rest()
            return
        await asyncio.sleep(0)
        self._replica.add(sorted(self._ready, key=attrgetter("order")))
        self._ready.clear()
        self._deliver(self._replica.step())
        self._nap = IDLE_SECONDS
        await asyncio.sleep(0)

    async def _rest(self) -> None:
        began = time.perf_counter()
        self._replica.rest()
        await self._take_a_nap()
        self._nap = min(2 * self._nap, MAX_IDLE_SECONDS)
        self.idle_seconds += time.perf_counter() - began

    async def _take_a_nap(self) -> None:
        loop = asyncio.get_running_loop()
        self._napping = loop.create_future()
        alarm = loop.call_later(self._nap, self._wake)
        try:
            await self._napping
        finally:
            alarm.cancel()
            self._napping = None

    def _wake(self) -> None:
        if self._napping is not None and not self._napping.done():
            self._napping.set_result(None)

    def _deliver(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            future = self._futures.pop(completion.id)
            if not future.done():  # its coroutine was cancelled
                future.set_result(completion)

    async def pause(self) -> int:
        """Empty the engine; every waiting coroutine gets what it has. Returns the number of requests stopped.

        A coroutine that then asks to go on is kept until the next turn.
        """
        num_stopped = len(self._futures)
        ready = {request.id for request in self._ready}
        self._replica.abort([id for id in self._futures if id not in ready])
        while self._replica.num_unfinished:
            self._deliver(self._replica.step())
        await asyncio.sleep(0)
        return num_stopped

    def clear(self) -> None:
        """Forget what coroutines asked for while paused: they have been cancelled."""
        assert len(self._ready) == len(self._futures), "clear() with requests in the engine"
        self._ready.clear()
        self._futures.clear()
