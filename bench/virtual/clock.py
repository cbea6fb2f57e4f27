"""A virtual clock for a few processes that wait for time and for each other."""

from collections.abc import Callable, Generator, Iterable
from heapq import heapify, heappop, heappush
from math import inf

Process = Generator[float | Callable[[], bool], None, None]
"""Yields how many seconds it is busy, or what must be true before it goes on."""


class Clock:
    """Plays processes; what they wait for is looked at after every event."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        """Seconds."""

    def play(self, processes: Iterable[Process], until: float = inf) -> bool:
        """Play to the end of all processes, or up to a moment; return whether they have ended.

        AssertionError if those that are left wait for each other for ever.
        """
        waiting: dict[int, Callable[[], bool]] = {}
        everyone = list(processes)
        due = [(self.now, number) for number in range(len(everyone))]
        heapify(due)
        while due:
            time, number = heappop(due)
            if time > until:
                self.now = until
                return False
            self.now = time
            self._go_on(everyone[number], number, due, waiting)
            while ready := [other for other, condition in waiting.items() if condition()]:
                for other in ready:
                    del waiting[other]
                    self._go_on(everyone[other], other, due, waiting)
        assert not waiting, "the processes wait for each other"
        return True

    def _go_on(
        self, process: Process, number: int, due: list[tuple[float, int]], waiting: dict[int, Callable[[], bool]]
    ) -> None:
        """Let one process run until it is busy, waits or ends."""
        for wish in process:
            if callable(wish):
                if not wish():
                    waiting[number] = wish
                    return
            else:
                heappush(due, (self.now + wish, number))
                return
