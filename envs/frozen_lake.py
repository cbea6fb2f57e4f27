"""FrozenLake: walk over the ice to the goal and into no hole; the ice may be slippery.

Gymnasium's rules on random boards, with ROLL's letters. Start and goal are random cells, and a board is drawn again
until the goal can be reached.

    env.lake.target=envs.frozen_lake:FrozenLake env.lake.args.is_slippery=false
"""

from random import Random
from typing import Any

from .drawings import drawn
from .grids import Oracle, check_observation, generator, rules, show, spellings, state_info, step_info

ACTIONS = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}
DIRECTIONS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Row and column offsets of an action, by its number; the neighbours of a number are the directions across it."""
CELLS = "P is the player, _ ice, O a hole, G the goal, X the player in a hole, \N{SQUARE ROOT} the player on the goal."
ICE, GOAL = "#dfeaf5", "#2e9e4f"
LOOKS = {
    "_": (ICE, "", ""),
    "O": (ICE, "disc", "#20262e"),
    "G": (GOAL, "", ""),
    "P": (ICE, "disc", "#e07b00"),
    "X": ("#20262e", "disc", "#e07b00"),
    "\N{SQUARE ROOT}": (GOAL, "disc", "#e07b00"),
}
SEEN = "The player is the orange disc, holes are black discs, and the goal is green."
TRIALS, MAX_DRAWS = 1000, 100_000
"""Number of draws within which settings must give a board: fewer when they are checked, so that a reset never fails."""
HORIZON = 1000
"""Largest number of steps that the oracle for slippery ice looks ahead."""

Plan = tuple[list[float], list[str | None]]
"""Greatest probability of reaching the goal, and the first action towards it, by cell; None without any."""


class FrozenLake(Oracle):
    """The lake: the goal ends the episode with a reward of 1, a hole with 0; an invalid action moves nothing."""

    def __init__(
        self,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        success_rate: float = 1 / 3,
        min_path: int = 1,
        max_steps: int | None = None,
        observation: str = "grid",
    ) -> None:
        """Configure boards of `size` * `size` cells, each of ice with probability `p`, with shortest paths of at least
        `min_path` steps.

        On slippery ice a step goes in its direction with probability `success_rate`, and otherwise to the left or right
        of it. After `max_steps` steps the episode is truncated.
        """
        check_observation(observation)
        if not (size >= 2 and 0 <= p <= 1 and 0 <= success_rate <= 1 and (max_steps is None or max_steps >= 1)):
            raise ValueError(
                f"{size=} {p=} {success_rate=} {max_steps=}: size from 2, probabilities, at least one step"
            )
        self._size, self._p, self._min_path, self._max_steps = size, p, min_path, max_steps
        self._observation = observation
        self._chances = (1.0, 0.0) if not is_slippery else (success_rate, (1 - success_rate) / 2)
        self._spellings = spellings(ACTIONS)
        cells = range(size * size)
        self._next = [[self._neighbour(cell, way) for way in DIRECTIONS] for cell in cells]
        self._over = True
        # Reports impossible settings at once, instead of at a reset.
        self._draw(Random(0), TRIALS)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw the board of this seed."""
        # Separate generators: the board of a seed does not depend on the settings of the ice.
        self._draw(generator(seed, "board"))
        self._slips = generator(seed, "slips")
        self._steps, self._over = 0, False
        self._plans: list[Plan] = []
        instruction = "Walk over the frozen lake to the goal. A hole ends the game."
        if self._chances[1]:
            instruction += " The ice is slippery: a step may go to the left or right of its direction instead."
        observation, *state = self._shown()
        cells = SEEN if self._observation == "picture" else CELLS
        instruction = f"{instruction}\n{rules(self._observation, cells, (self._size, self._size), ACTIONS)}"
        return observation, {"instruction": instruction} | state_info(*state)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a step: a word, first letter or number of `ACTIONS`."""
        if self._over:
            raise RuntimeError("the episode is over: reset comes next")
        self._steps += 1
        word = self._spellings.get(action.strip().lower())
        before = self._player
        if word is not None:
            straight, aside = self._chances
            way, luck = ACTIONS[word], self._slips.random()
            slip = 0 if luck < straight else 1 if luck < straight + aside else -1
            self._player = self._next[before][(way + slip) % 4]
        success = self._player == self._goal
        terminated = success or self._player in self._holes
        truncated = not terminated and self._steps == self._max_steps
        self._over = terminated or truncated
        observation, *state = self._shown()
        info = step_info(*state, word is not None, self._player != before, success)
        return observation, float(success), terminated, truncated, info

    def close(self) -> None:
        """Do nothing: the environment holds no resources."""

    def solution(self) -> list[str] | None:
        """Return the shortest way to the goal from here, [] at the goal, None if it is out of reach.

        On slippery ice: only the next action of the best policy, to be asked for after each step.
        """
        if self._player == self._goal:
            return []
        if self._over:
            return None
        if self._chances[1]:
            action = self._plan()[1][self._player]
            return None if action is None else [action]
        if self._max_steps is not None and self._distance[self._player] > self._max_steps - self._steps:
            return None
        way, cell = [], self._player
        while cell != self._goal:
            steps = zip(ACTIONS, self._next[cell], strict=True)
            word, cell = min(steps, key=lambda step: self._distance.get(step[1], len(self._next)))
            way.append(word)
        return way

    def best_return(self) -> float:
        """Return the greatest expected return from here: the probability of reaching the goal with the best play.

        Without `max_steps`: of reaching it in `HORIZON` steps.
        """
        return 0.0 if self._over else self._plan()[0][self._player]

    def _neighbour(self, cell: int, way: tuple[int, int]) -> int:
        row, column = (
            min(max(at + by, 0), self._size - 1) for at, by in zip(divmod(cell, self._size), way, strict=True)
        )
        return row * self._size + column

    def _draw(self, random: Random, draws: int = MAX_DRAWS) -> None:
        cells = range(self._size**2)
        for _ in range(draws):
            self._player, self._goal = random.sample(cells, 2)
            self._holes = {cell for cell in cells if random.random() >= self._p} - {self._player, self._goal}
            self._distance = self._distances()
            if self._distance.get(self._player, 0) >= self._min_path:
                return
        raise ValueError(
            f"size={self._size} p={self._p} min_path={self._min_path}: none of {draws} boards has such a path"
        )

    def _distances(self) -> dict[int, int]:
        """Return the least number of steps to the goal from each connected cell, without slipping."""
        found = {self._goal: 0}
        frontier = [self._goal]
        for cell in frontier:
            for neighbour in self._next[cell]:
                if neighbour not in found and neighbour not in self._holes:
                    found[neighbour] = found[cell] + 1
                    frontier.append(neighbour)
        return found

    def _plan(self) -> Plan:
        """Return the best play for the remaining steps, by value iteration over their number.

        An action replaces that for fewer steps only if it is better, so one that gains nothing is never chosen.
        """
        straight, aside = self._chances
        left = HORIZON if self._max_steps is None else self._max_steps - self._steps
        if not self._plans:
            values = [float(cell == self._goal) for cell in range(len(self._next))]
            self._plans.append((values, [None] * len(values)))
            for _ in range(min(left, HORIZON)):
                old, actions = self._plans[-1]
                values, actions = list(old), list(actions)
                for cell in self._distance.keys() - {self._goal}:
                    to = [old[neighbour] for neighbour in self._next[cell]]
                    for word, way in ACTIONS.items():
                        value = straight * to[way] + aside * (to[way - 1] + to[(way + 1) % 4])
                        if value > values[cell] + 1e-9:
                            values[cell], actions[cell] = value, word
                if values == old:
                    break
                self._plans.append((values, actions))
        return self._plans[min(left, len(self._plans) - 1)]

    def _shown(self) -> tuple[str, str, bytes | None]:
        """Return the observation, the board in rows of letters, and its picture."""
        letters = ["O" if cell in self._holes else "_" for cell in range(len(self._next))]
        letters[self._goal] = "G"
        letters[self._player] = {"_": "P", "O": "X", "G": "\N{SQUARE ROOT}"}[letters[self._player]]
        ground = {"holes": sorted(self._holes)}
        picture = drawn(letters, self._size, LOOKS) if self._observation == "picture" else None
        return *show(self._observation, letters, self._size, self._player, {"goal": [self._goal]}, ground), picture
