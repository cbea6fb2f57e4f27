"""The answers to one prompt that are under way: a task each, and one word when all of them have ended.

Left out: what a rollout is (`context.py`), and what waits for the word (`rollouts.py`). `asyncio.gather` would say the
same, for a callback a sample through the event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from spmd_rl.types import Prompt, Sample


class UnderWay:
    """Starts them. `ended` is called once: when all have ended, or the first has failed."""

    def __init__(
        self, prompt: Prompt, rollouts: Iterable[Coroutine[Any, Any, Sample]], ended: Callable[[], object]
    ) -> None:
        self.prompt = prompt
        self._ended, self._failed = ended, False
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(rollout)) for rollout in rollouts]
        self._num_left = len(self._tasks)
        assert self._tasks

    def samples(self) -> tuple[Sample, ...]:
        """What they made, in order, once they have ended. Raises what the first to fail has raised."""
        return tuple([task.result() for task in self._tasks if not self._failed or task.done()])

    async def cancel(self) -> None:
        """Give them up, and wait until they have let go."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, rollout: Coroutine[Any, Any, Sample]) -> Sample:
        done = False
        try:
            sample = await rollout
            done = True
            return sample
        finally:
            self._num_left -= 1
            if not self._failed and not (done and self._num_left):
                self._failed = not done
                self._ended()
