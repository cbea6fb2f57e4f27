"""Sokoban: push all boxes onto targets; boxes can be pushed but not pulled, so a wrong push may be final.

The rules and rewards of gym_sokoban with ROLL's letters. Every generated level can be solved; others come from a file.

    env.push.target=envs.sokoban:Sokoban env.push.args.search_depth=3
    env.push.target=envs.sokoban:LargerSokoban
    env.push.target=envs.sokoban:Sokoban env.push.args.levels=boxoban/medium_train_000.txt
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .drawings import drawn
from .grids import Oracle, check_observation, direction, generator, rules, show, spellings, state_info, step_info
from .sokoban_levels import TRIALS, LevelMaker, cells, read_levels, shift
from .sokoban_solver import solve

ACTIONS = {"Up": 1, "Down": 2, "Left": 3, "Right": 4}
LETTERS = "#_O\N{SQUARE ROOT}XPS"
MEANINGS = ("a wall", "floor", "a target", "a box on a target", "a box", "the player", "the player on a target")
FLOOR, PLAYER, CRATE, DONE = "#eee7d8", "#1565c0", "#b9843c", "#2e9e4f"
LOOKS = (
    ("#5b6470", "", ""),
    (FLOOR, "", ""),
    (FLOOR, "ring", ""),
    (FLOOR, "box", DONE),
    (FLOOR, "box", CRATE),
    (FLOOR, "disc", PLAYER),
    (FLOOR, "disc ring", PLAYER),
)
"""Looks of `MEANINGS`, in this order."""
SEEN = "Walls are grey, the player is a blue disc, targets are red rings, boxes are brown, and green on a target."
STEP, BOX, SOLVED = -0.1, 1.0, 10.0
"""Rewards of every step, of a box onto a target (negative for the reverse), of all boxes on targets."""


class Sokoban(Oracle):
    """The game, which ends when all boxes are on targets; an invalid action is a step without movement.

    The default is ROLL's SimpleSokoban: a room of 6 * 6 cells with its walls, and one box.
    """

    def __init__(
        self,
        size: int | Sequence[int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = 30,
        min_pushes: int = 1,
        walk: int | None = None,
        turn: float = 0.35,
        levels: str | None = None,
        first_level: int = 0,
        num_levels: int | None = None,
        max_steps: int | None = None,
        letters: str = LETTERS,
        observation: str = "grid",
    ) -> None:
        """Configure the levels.

        A level takes `min_pushes` to `search_depth` pushes in a room of `size` (height, width), walls included, shaped
        by `walk` (default 1.7 * (height + width)) and `turn`, see `LevelMaker`. Or the seed chooses one of the
        `num_levels` levels of the file `levels` from `first_level` on. After `max_steps` steps the episode is
        truncated. `letters` are those of `MEANINGS`, in this order.
        """
        check_observation(observation)
        if len(set(letters)) != len(MEANINGS) or len(letters) != len(MEANINGS):
            raise ValueError(f"letters={letters}: needs {len(MEANINGS)} different ones")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: must be at least 1")
        self._levels, self._maker = None, None
        if levels is not None:
            end = None if num_levels is None else first_level + num_levels
            self._levels = read_levels(levels)[first_level:end]
            if not self._levels:
                raise ValueError(f"{levels}: has no levels from {first_level} on")
        else:
            height, width = (size, size) if isinstance(size, int) else size
            walk = int(1.7 * (height + width)) if walk is None else walk
            self._maker = LevelMaker(height, width, num_boxes, min_pushes, search_depth, walk, turn)
            # Reports impossible settings at once, instead of at a reset.
            self._maker.make(generator(0, "level"), TRIALS)
        self._max_steps, self._letters, self._observation = max_steps, letters, observation
        self._spellings = spellings(ACTIONS)
        self._over = True

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Make or choose the level of this seed."""
        random = generator(seed, "level")
        self._level = self._maker.make(random) if self._maker else random.choice(self._levels)
        self._boxes, self._player = self._level.boxes, self._level.player
        self._ways = dict(zip(ACTIONS, (-self._level.width, self._level.width, -1, 1), strict=True))
        self._steps, self._over = 0, False
        self._draw_room()
        named = ", ".join(f"{letter} {meaning}" for letter, meaning in zip(self._letters, MEANINGS, strict=True))
        instruction = "Push all boxes onto targets. You walk up to a box and push it; you cannot pull. Walls stop you."
        size = self._level.height, self._level.width
        cells = SEEN if self._observation == "picture" else f"The letters: {named}."
        instruction = f"{instruction}\n{rules(self._observation, cells, size, ACTIONS)}"
        observation, *state = self._shown()
        return observation, {"instruction": instruction} | state_info(*state)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Walk or push: a word, first letter or number of `ACTIONS`."""
        if self._over:
            raise RuntimeError("the episode is over: reset comes next")
        self._steps += 1
        word = self._spellings.get(action.strip().lower())
        before, on_target = self._player, self._on_target()
        if word is not None:
            self._move(self._ways[word])
        gained = self._on_target() - on_target
        terminated = self._boxes == self._level.targets
        truncated = not terminated and self._steps == self._max_steps
        self._over = terminated or truncated
        reward = STEP + BOX * gained + SOLVED * terminated
        observation, *state = self._shown()
        info = step_info(*state, word is not None, self._player != before, terminated)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Do nothing: the environment holds no resources."""

    def solution(self) -> list[str] | None:
        """Return a shortest sequence of actions that solves the level from here, [] if it is solved.

        None: it cannot be solved any more in the remaining steps, or the search grew too large (see `solve`).
        """
        if self._boxes == self._level.targets:
            return []
        plan = None if self._over else self._solve()
        return plan if plan is None or self._steps_left() >= len(plan) else None

    def best_return(self) -> float:
        """Return the greatest return from here.

        It is exact if the level can be solved in time, or misses only one box; else an upper bound: all boxes but one
        on targets; a solution in one step if none is known.
        """
        if self._over:
            return 0.0
        missing, left, plan = self._boxes.bit_count() - self._on_target(), self._steps_left(), self._solve()
        if plan is not None and len(plan) > left:
            return BOX * (missing - 1) + STEP * left
        return SOLVED + BOX * missing + STEP * (1 if plan is None else len(plan))

    def _solve(self) -> list[str] | None:
        return solve(replace(self._level, boxes=self._boxes, player=self._player))

    def _steps_left(self) -> float:
        return float("inf") if self._max_steps is None else self._max_steps - self._steps

    def _on_target(self) -> int:
        return (self._boxes & self._level.targets).bit_count()

    def _move(self, by: int) -> None:
        there = shift(self._player, by)
        if there & self._boxes:
            beyond = shift(there, by)
            if not beyond & self._level.floor & ~self._boxes:
                return
            self._boxes ^= there | beyond
        self._player = there if there & self._level.floor else self._player

    def _draw_room(self) -> None:
        """Prepare the constant parts of the level: letters of walls, floor and targets, and the inner walls."""
        level, (wall, floor, target) = self._level, self._letters[:3]
        self._targets, open_cells = _numbers(level.targets), set(_numbers(level.floor))
        self._room = [floor if cell in open_cells else wall for cell in range(level.height * level.width)]
        for cell in self._targets:
            self._room[cell] = target
        inner = (divmod(cell, level.width) for cell, letter in enumerate(self._room) if letter == wall)
        self._walls = [
            row * level.width + column
            for row, column in inner
            if 0 < row < level.height - 1 and 0 < column < level.width - 1
        ]

    def _shown(self) -> tuple[str, str, bytes | None]:
        """Return the observation, the board in rows of letters, and its picture."""
        _, _, target, box_on_target, box, player, player_on_target = self._letters
        letters, boxes, (at,) = list(self._room), _numbers(self._boxes), _numbers(self._player)
        for cell in boxes:
            letters[cell] = box_on_target if letters[cell] == target else box
        letters[at] = player_on_target if letters[at] == target else player
        ground = {"inner walls": self._walls}
        if self._observation == "relative":
            ground = {"walls": [cell for cell, letter in enumerate(letters) if letter == self._letters[0]]}
        things = {"boxes": boxes, "targets": self._targets}
        observation, board = show(self._observation, letters, self._level.width, at, things, ground)
        if self._observation == "relative":
            observation += f"\nfrom box to target: {'; '.join(map(self._to_target, boxes))}"
        looks = dict(zip(self._letters, LOOKS, strict=True))
        picture = drawn(letters, self._level.width, looks) if self._observation == "picture" else None
        return observation, board, picture

    def _to_target(self, box: int) -> str:
        """Return the direction of the target nearest to a box."""
        width = self._level.width

        def distance(target: int) -> int:
            return abs(target // width - box // width) + abs(target % width - box % width)

        return direction(min(self._targets, key=distance), box, width)


def _numbers(mask: int) -> list[int]:
    return [cell.bit_length() - 1 for cell in cells(mask)]


class LargerSokoban(Sokoban):
    """ROLL's LargerSokoban: 10 * 10 cells and two boxes."""

    def __init__(
        self, size: int | Sequence[int] = (10, 10), num_boxes: int = 2, search_depth: int = 10, **settings: Any
    ) -> None:
        """Configure the levels as in `Sokoban`, with other defaults."""
        super().__init__(size, num_boxes, search_depth, **settings)


class SokobanDifferentGridVocab(Sokoban):
    """ROLL's SokobanDifferentGridVocab: the simple room in other letters."""

    def __init__(self, letters: str = "W.GCBA@", **settings: Any) -> None:
        """Configure the levels as in `Sokoban`, with other letters."""
        super().__init__(letters=letters, **settings)
