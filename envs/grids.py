"""The common part of the grid worlds: random numbers, names of actions, grids as text, and uses of the oracle."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from random import Random
from statistics import fmean
from typing import Any

OBSERVATIONS = ("grid", "spaced", "coordinates", "relative", "picture")
"""Forms of a state: rows of letters, the same with spaces between the letters, a list of positions, positions relative
to the player, which small models read best, or a picture alone.
"""
SIDES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
"""Row and column offsets of each side."""


def generator(seed: int, purpose: str) -> Random:
    """Return a generator that depends on these two alone, so that draws for one purpose never shift
    those for another.
    """
    digest = blake2b(f"{seed},{purpose}".encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "little"))


def spellings(actions: Mapping[str, int]) -> dict[str, str]:
    """Return the action of each accepted spelling: its word, first letter and number, in lower case."""
    return {
        spelling: word for word, number in actions.items() for spelling in (word.lower(), word[0].lower(), f"{number}")
    }


def rules(observation: str, cells: str, size: tuple[int, int], actions: Mapping[str, int]) -> str:
    """Return an instruction about the observation and the actions.

    cells: explanation of the letters. size: (rows, columns).
    """
    rows, columns = size
    if observation == "coordinates":
        cells = f"Positions are (row, column), from (0, 0) at the top left to ({rows - 1}, {columns - 1})."
    elif observation == "relative":
        cells = "Places are told as seen from you."
    return f"{cells}\nActions: {', '.join(actions)}."


def show(
    observation: str,
    letters: Sequence[str],
    width: int,
    player: int,
    things: Mapping[str, Iterable[int]],
    ground: Mapping[str, Iterable[int]],
) -> tuple[str, str]:
    """Return a state as an observation, and as rows of letters (the same if `observation` is `grid`).

    `letters` holds one letter for each cell, row by row, and a cell is an index into it. `player` is a cell, `things`
    and `ground` are cells by name: of the ground, the player sees only neighbouring cells.
    """
    rows = ["".join(letters[at : at + width]) for at in range(0, len(letters), width)]
    board = "\n".join(rows)
    if observation == "grid":
        return board, board
    if observation == "picture":
        return "", board
    if observation == "spaced":
        return "\n".join(map(" ".join, rows)), board
    if observation == "relative":
        lines = {name: [direction(cell, player, width) for cell in cells] for name, cells in things.items()}
        lines |= {name: _sides(cells, player, width, len(rows)) for name, cells in ground.items()}
        return "\n".join(f"{name}: {'; '.join(where) or 'none'}" for name, where in lines.items()), board
    lines = {
        name: [f"({cell // width}, {cell % width})" for cell in cells]
        for name, cells in {"player": [player], **things, **ground}.items()
    }
    return "\n".join(f"{name}: {' '.join(where) or 'none'}" for name, where in lines.items()), board


def direction(cell: int, player: int, width: int) -> str:
    """Return the direction and distance of a cell from the player, or from another cell: `Down 2, Left 1`."""
    down, right = cell // width - player // width, cell % width - player % width
    steps = {"Up": -down, "Down": down, "Left": -right, "Right": right}
    return ", ".join(f"{side} {count}" for side, count in steps.items() if count > 0) or "here"


def _sides(cells: Iterable[int], player: int, width: int, height: int) -> list[str]:
    """Return the sides of the player that have one of the cells."""
    row, column = divmod(player, width)
    beside = {side: (row + down, column + right) for side, (down, right) in SIDES.items()}
    inside = {side: r * width + c for side, (r, c) in beside.items() if 0 <= r < height and 0 <= c < width}
    wanted = set(cells)
    return [side for side, cell in inside.items() if cell in wanted]


def check_observation(observation: str) -> None:
    """Raise ValueError for an unknown form of a state."""
    if observation not in OBSERVATIONS:
        raise ValueError(f"observation={observation}: known are {', '.join(OBSERVATIONS)}")


def state_info(board: str, picture: bytes | None) -> dict[str, Any]:
    """Return what `info` has of a state: its board and its picture, if there is one."""
    return {"state_key": board, "board": board} | ({"pictures": [picture]} if picture else {})


def step_info(board: str, picture: bytes | None, valid: bool, effective: bool, success: bool) -> dict[str, Any]:
    """Return the `info` of a step, with ROLL's metrics."""
    values = {"action_is_valid": valid, "action_is_effective": effective, "num_actions": 1, "success": success}
    return state_info(board, picture) | {
        "metrics": {name: float(value) for name, value in values.items()},
        "metrics_agg_mode": {**dict.fromkeys(values, "mean"), "num_actions": "sum", "success": "last"},
    }


class Oracle:
    """Uses of an environment's `solution()` and `best_return()`, which know the best play from its state."""

    def demonstrate(self, seed: int) -> list[str]:
        """Play the best episode of a seed and return its actions; with chance involved, it may still be lost."""
        self.reset(seed)
        played: list[str] = []
        while plan := self.solution():
            for action in plan:
                self.step(action)
            played += plan
        return played

    def upper_bound(self, seeds: Iterable[int]) -> float:
        """Return the mean over episodes of these seeds of the return that no policy exceeds in expectation."""
        bounds = []
        for seed in seeds:
            self.reset(seed)
            bounds.append(self.best_return())
        return fmean(bounds)
