"""Nim: two players take stones from piles in turns, and the one who takes the last stone wins. The first position can
be won.

    env.nim.target=envs.nim:NimEnv env.nim.args.piles=3 env.nim.args.stones=7
"""

import random
from functools import reduce
from operator import xor

from .games import GameEnv


class NimEnv(GameEnv):
    """The game of Nim. A position is the number of stones in each pile.

    The model begins if the first player can force a win, and the opponent if the second can.
    """

    RULES = """This is Nim. Players take stones in turns: one or more, all from one pile. Who takes the last stone wins.
A move is two numbers: the pile, counted from 1, and how many stones to take from it, such as 2 3."""

    def __init__(self, piles: int = 3, stones: int = 5, skill: float = 0.5) -> None:
        """Set the size of the game; `stones`: the largest pile at the start. ValueError if it is too large to be
        searched.
        """
        super().__init__(skill)
        if not (1 <= piles <= 5 and 1 <= stones <= 9):
            raise ValueError(f"piles={piles}, stones={stones}: at most 5 piles of 9 stones")
        self._piles, self._stones = piles, stones

    def begin(self, rng: random.Random) -> tuple[tuple[int, ...], bool]:
        """Draw the piles; return them and who begins."""
        piles = tuple(rng.randint(1, self._stones) for _ in range(self._piles))
        return piles, reduce(xor, piles) != 0

    def moves(self, position: tuple[int, ...]) -> list[str]:
        """Return every pile with every number of stones that can be taken from it."""
        return [f"{i + 1} {taken}" for i, pile in enumerate(position) for taken in range(1, pile + 1)]

    def play(self, position: tuple[int, ...], move: str) -> tuple[int, ...]:
        """Return the piles without the taken stones."""
        pile, taken = map(int, move.split())
        return tuple(stones - taken * (i + 1 == pile) for i, stones in enumerate(position))

    def outcome(self, position: tuple[int, ...]) -> int:
        """Return -1, since the other player has taken the last stone."""
        return -1

    def show(self, position: tuple[int, ...]) -> str:
        """Return a line for each pile."""
        return "\n".join(f"pile {i + 1}: {stones} {'o' * stones}".rstrip() for i, stones in enumerate(position))

    def best_moves(self, position: tuple[int, ...]) -> list[str]:
        """Return the moves that leave the piles with a nim-sum of 0 (Bouton 1901); all moves if none does."""
        moves = self.moves(position)
        return [move for move in moves if not reduce(xor, self.play(position, move))] or moves
