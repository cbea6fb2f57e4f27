"""An environment whose worlds differ by seed, and that a random model can play: any text is an action."""

import time
from random import Random
from typing import Any


class Echo:
    """Pays for letters that occur in the answer, and ends after one to four steps."""

    def __init__(self, delay: float = 0.0) -> None:
        self._delay = delay

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw the letters and the length."""
        self._random = Random(seed)
        self._left = self._random.randint(1, 4)
        return self._say(), {"instruction": "say letters", "state_key": str(self._left)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Count what was said."""
        time.sleep(self._delay * self._random.random())
        self._left -= 1
        reward = sum(ord(letter) for letter in action) % 7 / 7
        metrics = {"success": float(reward > 0.5), "action_is_valid": float(bool(action))}
        info = {"state_key": str(self._left), "metrics": metrics, "metrics_agg_mode": {"success": "last"}}
        return self._say(), reward, self._left == 0, False, info

    def solution(self) -> list[str]:
        """Say a letter."""
        return ["a"] * self._left

    def _say(self) -> str:
        return self._random.choice("abcdefgh")
