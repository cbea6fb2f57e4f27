"""The shortest solution of a Sokoban level, counted in steps: A* over the pushes, with the walks between them."""

from collections.abc import Iterator
from heapq import heappop, heappush

from .sokoban_levels import Level, cells, shift, spread

State = tuple[int, int]
"""Masks of the boxes and of the player."""


def solve(level: Level, max_states: int = 200_000) -> list[str] | None:
    """Return the words of a shortest solution; None if none exists, or none within `max_states` states."""
    search = _Search(level)
    start = level.boxes, level.player
    estimate = search.estimate(level.boxes)
    queue = [(estimate, 0, start)] if estimate is not None else []
    steps_to = {start: 0}
    came: dict[State, tuple[State, int, str]] = {}
    done: set[State] = set()
    while queue and len(steps_to) <= max_states:
        _, steps, state = heappop(queue)
        if state in done:
            continue
        if state[0] == level.targets:
            return search.retrace(came, state)
        done.add(state)
        for after, box, word, cost in search.pushes(*state):
            if steps + cost < steps_to.get(after, steps + cost + 1):
                estimate = search.estimate(after[0])
                if estimate is not None:
                    steps_to[after] = steps + cost
                    came[after] = state, box, word
                    heappush(queue, (steps + cost + estimate, steps + cost, after))
    return None


class _Search:
    def __init__(self, level: Level) -> None:
        self._floor, self._width = level.floor, level.width
        self._ways = {"Up": -level.width, "Down": level.width, "Left": -1, "Right": 1}
        self._pushes_to_target = self._distances(level.targets)

    def _distances(self, targets: int) -> dict[int, int]:
        """Return the least number of pushes to any target for a lone box, by cell; from other cells it never gets
        there.
        """
        found = dict.fromkeys(cells(targets), 0)
        frontier = list(found)
        for cell in frontier:
            for by in self._ways.values():
                there = shift(cell, by)
                if there not in found and there & self._floor and shift(there, by) & self._floor:
                    found[there] = found[cell] + 1
                    frontier.append(there)
        return found

    def estimate(self, boxes: int) -> int | None:
        """Return a lower bound of the remaining steps; None if a box can never reach a target."""
        pushes = [self._pushes_to_target.get(box) for box in cells(boxes)]
        return None if None in pushes else sum(pushes)

    def pushes(self, boxes: int, player: int) -> Iterator[tuple[State, int, str, int]]:
        """Yield each possible push after a walk: (state after it, the box's cell before, direction, steps)."""
        free = self._floor & ~boxes
        walk = self._walk(player, free)
        region = sum(walk)
        for word, by in self._ways.items():
            for box in cells(boxes & shift(region, by) & shift(free, -by)):
                stand = shift(box, -by)
                steps = next(at for at, layer in enumerate(walk) if layer & stand)
                yield (boxes ^ box ^ shift(box, by), box), box, word, steps + 1

    def _walk(self, player: int, free: int) -> list[int]:
        """Return by number of steps the cells that the player first reaches then."""
        layers, seen = [player], player
        while layer := spread(layers[-1], self._width) & free & ~seen:
            layers.append(layer)
            seen |= layer
        return layers

    def retrace(self, came: dict[State, tuple[State, int, str]], state: State) -> list[str]:
        """Return the words that led to a state: for each push, the walk to the box, and the push."""
        words: list[str] = []  # from the last to the first
        while state in came:
            state, box, word = came[state]
            boxes, player = state
            cell = shift(box, -self._ways[word])
            words.append(word)
            walk = self._walk(player, self._floor & ~boxes)
            for layer in reversed(walk[: next(at for at, layer in enumerate(walk) if layer & cell)]):
                step, by = next((step, by) for step, by in self._ways.items() if shift(cell, -by) & layer)
                words.append(step)
                cell = shift(cell, -by)
        return words[::-1]
