"""Tic-tac-toe against an opponent that plays perfectly, at random, or between. Who begins is drawn.

env.tictactoe.target=envs.tictactoe:TicTacToeEnv env.tictactoe.args.skill=1.0
"""

import random

from .games import GameEnv

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
OTHER = {"X": "O", "O": "X"}


class TicTacToeEnv(GameEnv):
    """The game. A position is the nine cells, `X`, `O` or `.`, and the mark to move; X is the model's."""

    RULES = """This is tic-tac-toe. Three of your own marks in a row, column or diagonal win.
Your mark is X, the opponent's is O. A move is the number of a free cell, 1 to 9."""

    def begin(self, rng: random.Random) -> tuple[tuple[str, str], bool]:
        """Return an empty board, and True if the model begins."""
        mark = rng.choice("XO")
        return ("." * 9, mark), mark == "X"

    def moves(self, position: tuple[str, str]) -> list[str]:
        """Return the free cells, none once three are in a row."""
        return [] if self.outcome(position) else [str(i + 1) for i, mark in enumerate(position[0]) if mark == "."]

    def play(self, position: tuple[str, str], move: str) -> tuple[str, str]:
        """Return the board with the mark in that cell."""
        (board, mark), cell = position, int(move) - 1
        return board[:cell] + mark + board[cell + 1 :], OTHER[mark]

    def outcome(self, position: tuple[str, str]) -> int:
        """Return -1 if the other player has three in a row, else 0."""
        board, mark = position
        return -any(all(board[cell] == OTHER[mark] for cell in line) for line in LINES)

    def show(self, position: tuple[str, str]) -> str:
        """Return the board in three lines; a free cell shows its number."""
        cells = [str(i + 1) if mark == "." else mark for i, mark in enumerate(position[0])]
        return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))
