"""The common part of games against a scripted opponent: turns, wins, and an opponent of any skill.

A game (`nim`, `tictactoe`) defines its positions and moves. The opponent plays a best move, found by searching the game
to its end, with probability `skill`, and else any legal one. A won game is worth 1, a draw 0, a lost one -1.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

AGGREGATION = {"success": "last", "draw": "last", "loss": "last"}


class GameEnv(ABC):
    """A game of two players who move in turns and see everything. Positions are hashable, moves texts."""

    RULES = ""
    """Instruction of the model: the rules, and the form of a move."""
    _values: dict[Hashable, int]
    """Values of positions for the player to move, in a table that all games of a class fill and share."""

    def __init_subclass__(cls) -> None:
        """Give each game class a separate table."""
        cls._values = {}

    def __init__(self, skill: float = 0.5) -> None:
        """Set the probability of the opponent's best moves. ValueError outside of 0 to 1."""
        if not 0.0 <= skill <= 1.0:
            raise ValueError(f"skill={skill}: a probability, 0 to 1")
        self._skill = skill
        self._rng = random.Random(0)
        self._position: Any = None

    @abstractmethod
    def begin(self, rng: random.Random) -> tuple[Any, bool]:
        """Return the first position, and True if the model begins."""

    @abstractmethod
    def moves(self, position: Any) -> list[str]:
        """Return the legal moves, in a fixed order; none in a position where the game is over."""

    @abstractmethod
    def play(self, position: Any, move: str) -> Any:
        """Return the position after a legal move."""

    @abstractmethod
    def outcome(self, position: Any) -> int:
        """Return the value of a position without moves for the player who would move: -1, 0 or 1."""

    @abstractmethod
    def show(self, position: Any) -> str:
        """Return the position as text for the model."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Set up the game; the opponent moves if it begins."""
        self._rng = random.Random(seed)
        self._position, model_begins = self.begin(self._rng)
        said = "" if model_begins else self._answer()
        return said + self._view(), {"instruction": self.RULES, **self._known()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the model's move, then the opponent's. An illegal move changes nothing."""
        move = " ".join(action.lower().split())
        legal, said, result = self.moves(self._position), "", None
        if valid := move in legal:
            self._position = self.play(self._position, move)
            if self.moves(self._position):
                said = self._answer()
                result = None if self.moves(self._position) else self.outcome(self._position)
            else:
                result = -self.outcome(self._position)
        else:
            said = "That is not a legal move.\n"
        metrics = {
            "success": float(result == 1),
            "draw": float(result == 0),
            "loss": float(result == -1),
            "action_is_valid": float(valid),
            "action_is_effective": float(valid),
        }
        text = said + (self._view() if result is None else self._end(result))
        info = {"metrics": metrics, "metrics_agg_mode": AGGREGATION, **self._known()}
        return text, float(result or 0), result is not None, False, info

    def solution(self) -> list[str]:
        """Return a best move in the present position, none at the end: an oracle for demonstrations."""
        return self.best_moves(self._position)[:1]

    def best_moves(self, position: Any) -> list[str]:
        """Return the moves with the best outcome against any reply."""
        values = {move: -self._value(self.play(position, move)) for move in self.moves(position)}
        return [move for move, value in values.items() if value == max(values.values())]

    def _value(self, position: Any) -> int:
        if position not in self._values:
            after = [-self._value(self.play(position, move)) for move in self.moves(position)]
            self._values[position] = max(after) if after else self.outcome(position)
        return self._values[position]

    def _answer(self) -> str:
        """Move for the opponent; return the message about it."""
        best = self._rng.random() < self._skill
        move = self._rng.choice(self.best_moves(self._position) if best else self.moves(self._position))
        self._position = self.play(self._position, move)
        return f"The opponent plays {move}.\n"

    def _view(self) -> str:
        return f"{self.show(self._position)}\nLegal moves: {', '.join(self.moves(self._position))}"

    def _end(self, result: int) -> str:
        return f"{self.show(self._position)}\n{'You win.' if result > 0 else 'You lose.' if result else 'A draw.'}"

    def _known(self) -> dict[str, Any]:
        return {"state_key": repr(self._position), "board": self.show(self._position)}
