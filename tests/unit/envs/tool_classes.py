"""Tool classes as a user writes them."""

from typing import Literal


class Guess:
    """Knows a number."""

    def reset(self, secret: int, **row) -> str | None:
        self.secret, self.reward, self.done = secret, 0.0, False
        return "I think of a number from 1 to 10."

    def guess(self, number: int, tone: Literal["kind", "rude"] = "kind") -> str:
        """Guess the number.

        Some more words.

        Args:
            number (int): Your guess,
                from 1 to 10.
            tone: How to say it.

        Returns:
            Whether it is right.
        """
        if number > 10:
            raise IndexError("more than ten")
        self.reward = float(number == self.secret)
        self.done = self.reward == 1.0
        return f"{'yes' if self.reward else 'no'}, {tone}"

    def digits(self, numbers: list[int]) -> dict[str, int]:
        """Count the digits of numbers."""
        return {"count": sum(len(str(n)) for n in numbers)}

    def _hidden(self) -> None:
        """Never a tool."""


class Counter:
    """Earns by the step, and knows its seed."""

    step_type = int
    """A class is no tool."""

    def reset(self, seed: int) -> None:
        self.seed, self.count = seed, 0

    def reward(self) -> float:
        return self.count / 4

    def success(self) -> bool:
        return self.count == 2

    def add(self) -> str:
        """Count one further."""
        self.count += 1
        return str(self.seed)


class NoHint:
    """Has a tool whose parameter has no type."""

    def reset(self) -> None: ...

    def tool(self, x) -> str:
        """Do something."""


class NoDocstring:
    """Has a tool without a docstring."""

    def reset(self) -> None: ...

    def tool(self, x: int) -> str:
        return ""


class NoTools:
    """Has none."""

    def reset(self) -> None: ...
