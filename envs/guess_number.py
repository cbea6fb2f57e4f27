"""The opponent thinks of a number; each guess is answered with higher or lower. Bisection always finds it in time.

env.number.target=envs.guess_number:GuessNumberEnv env.number.args.largest=100
"""

import random
from typing import Any


class GuessNumberEnv:
    """A game with 1.0 for the right guess; after the last wrong one it is lost, with 0."""

    def __init__(self, largest: int = 100, guesses: int = 0) -> None:
        """Set the number of guesses; 0: as many as bisection needs. ValueError without a number to guess."""
        if largest < 1 or guesses < 0:
            raise ValueError(f"largest={largest}, guesses={guesses}: at least 1 and 0")
        self._largest, self._guesses = largest, guesses or largest.bit_length()
        self._secret, self._left, self._low, self._high = 1, self._guesses, 1, largest
        self._over = False

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw the number of this seed."""
        self._secret, self._left = random.Random(seed).randint(1, self._largest), self._guesses
        self._low, self._high, self._over = 1, self._largest, False
        text = f"I think of a number from 1 to {self._largest}. You have {self._left} guesses."
        return text, {"instruction": "Guess the number. A guess is a number alone.", "state_key": self._state_key()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a guess. A text that is no number in the range costs no guess."""
        text = action.strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
        valid, before = 1 <= guess <= self._largest, (self._low, self._high)
        if valid:
            self._left -= 1
            self._low = max(self._low, guess + 1) if guess < self._secret else self._low
            self._high = min(self._high, guess - 1) if guess > self._secret else self._high
        found = guess == self._secret
        lost = not found and self._left == 0
        self._over = found or lost
        metrics = {
            "success": float(found),
            "action_is_valid": float(valid),
            "action_is_effective": float(found or (self._low, self._high) != before),
        }
        said = f"My number is {'higher' if guess < self._secret else 'lower'}. You have {self._left} guesses left."
        if not valid:
            said = f"A guess is a number from 1 to {self._largest}."
        elif found or lost:
            said = "Right!" if found else f"No guesses are left. It was {self._secret}."
        info = {"metrics": metrics, "metrics_agg_mode": {"success": "last"}, "state_key": self._state_key()}
        return said, float(found), found or lost, False, info

    def solution(self) -> list[str]:
        """Return the number that bisects the remaining range, none at the end: an oracle for demonstrations."""
        return [] if self._over else [str((self._low + self._high) // 2)]

    def _state_key(self) -> str:
        """Return the model's knowledge: the remaining range and guesses."""
        return f"{self._low}-{self._high} {self._left}"
