"""An engine as a model of time: all that run get one token a step, and a step takes longer the more of them there are.

Between two events nothing is computed: the next answer to end is the one with the fewest tokens left.
Left out: prefill, the growth of attention with length, preemption, and that requests join at the next step only.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of an engine step: `base + per_request * running`.

    The defaults stand for 7B parameters in bfloat16 on one H100: 15 GB of weights at 3 TB/s and 3 ms of overhead; a
    request reads the keys and values of some 2,000 tokens (0.04 ms) and computes one token (0.02 ms).
    """

    base: float = 8e-3
    per_request: float = 6e-5

    def step(self, running: int) -> float:
        """Seconds of one step."""
        return self.base + self.per_request * running


class VirtualEngine:
    """Requests under way on one replica; a request is any key that can be ordered."""

    def __init__(self, speed: Speed, max_running: int) -> None:
        self.busy = 0.0
        """seconds in which something ran"""
        self.tokens = 0.0
        """tokens computed"""
        self._speed, self._max_running = speed, max_running
        self._now = self._steps = 0.0
        self._running: list[tuple[float, Any]] = []
        """a heap of (value of `_steps` at which it ends, request)"""
        self._queue: deque[tuple[Any, float]] = deque()

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return len(self._running) + len(self._queue)

    @property
    def step_seconds(self) -> float:
        """Of a step with what runs now."""
        return self._speed.step(len(self._running))

    def advance(self, now: float) -> list[Any]:
        """Compute until `now`, which must not lie beyond `next_end`. What has ended, in order."""
        self._compute(now)
        ended = []
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            ended.append(heappop(self._running)[1])
        self._fill()
        return sorted(ended)

    def pause(self, now: float, seconds: float) -> None:
        """Stand still for so long from `now` on, or from the end of the pause that it is in."""
        self._compute(now)
        self._now += seconds

    def add(self, request: Any, num_tokens: float) -> None:
        """Queue a request that will have so many tokens."""
        self._queue.append((request, num_tokens))
        self._fill()

    def next_end(self) -> float:
        """When the next request ends, if none is added."""
        if not self._running:
            return inf
        return self._now + max(0.0, self._running[0][0] - self._steps) * self.step_seconds

    def stop(self) -> dict[Any, float]:
        """Empty the engine: request -> tokens it still needed, in order."""
        left = {request: end - self._steps for end, request in self._running} | dict(self._queue)
        self._running.clear()
        self._queue.clear()
        return dict(sorted(left.items()))

    def _compute(self, now: float) -> None:
        if self._running and now > self._now:  # else it stands still until later
            steps = (now - self._now) / self.step_seconds
            self._steps += steps
            self.busy += now - self._now
            self.tokens += steps * len(self._running)
        self._now = max(self._now, now)

    def _fill(self) -> None:
        while self._queue and len(self._running) < self._max_running:
            request, num_tokens = self._queue.popleft()
            heappush(self._running, (self._steps + num_tokens, request))
