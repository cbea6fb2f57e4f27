"""A plain class whose public methods are tools, in the form of TRL's `environment_factory`:

    class Guess:
        def reset(self, **row) -> str | None:
            self.secret, self.reward = row["secret"], 0.0
            return "I think of a number from 1 to 10."

        def guess(self, number: int) -> str:
            '''Guess the number.

            Args:
                number: Your guess.
            '''
            self.reward = float(number == self.secret)
            return "yes" if self.reward else "no"

    env.guess.target=envs.adapters.tool_class:ToolClassEnv env.guess.args.target=my_tools:Guess
    env.guess.args.rows=my_rows.jsonl

The constructor takes no arguments. `reset` gets the columns of a row, or without rows the episode's `seed` if it has
that parameter, and may return a text, which follows the row's `prompt`. Each public method with type hints and a
docstring is a tool; its exception is its reply. A text without a tool call, or the class's `done`, ends the episode.

`reward`, an attribute or a method without arguments, is the episode's reward so far: a step is paid the increase, so an
episode that is cut short keeps its reward. `success`, likewise, is optional; without it an episode succeeds with a
reward of 1. `close` is optional.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..rows import read_rows, split_prompt
from ..tool_calls import Toolbox

RESERVED = frozenset({"reset", "close", "reward", "done", "success"})
"""Public names that are no tools."""
AGGREGATION = {"success": "last", "tool_calls": "sum", "tool_failures": "sum"}


class ToolClassEnv:
    """An environment over one instance of the class, reset for each episode."""

    def __init__(self, target: str, rows: str = "") -> None:
        """Build the class and its tools.

        `target`: `module:Class`. `rows`: a JSONL file, each line the arguments of one `reset`; the seed picks one.
        ValueError if the class has no tools or one of them lacks a type hint or docstring.
        """
        module, _, name = target.partition(":")
        if not isinstance(found := getattr(importlib.import_module(module), name, None), type):
            raise ValueError(f"target={target}: {module} has no class {name}")
        self._played = found()
        names = [name for name in dir(found) if not name.startswith("_") and name not in RESERVED]
        methods = {name: getattr(self._played, name) for name in names if inspect.isroutine(getattr(found, name))}
        if not methods:
            raise ValueError(f"target={target}: it has no public methods, which would be its tools")
        self._tools = Toolbox.of(methods)
        self._rows = read_rows(rows) if rows else []
        self._earned = 0.0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Reset the instance with the row that the seed picks."""
        row = self._rows[seed % len(self._rows)] if self._rows else {}
        given = {"seed": seed} | row
        said = self._played.reset(**_accepted(self._played.reset, given))
        system, asked = split_prompt(row.get("prompt"))
        self._earned = self._total()
        info = {"tools": self._tools.schemas} | ({"instruction": system} if system else {})
        return "\n\n".join(text for text in (asked, said) if text), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Call the tools that the action names; a text without a call ends the episode."""
        reply, total = self._tools.play(action), self._total()
        gained, self._earned = total - self._earned, total
        metrics = {
            "success": float(_value(self._played, "success", total >= 1.0)),
            "action_is_valid": float(reply.valid),
            "action_is_effective": float(reply.valid and not reply.failures),
            "tool_calls": float(reply.calls),
            "tool_failures": float(reply.failures),
        }
        ended = bool(reply.said) or bool(_value(self._played, "done", False))
        return reply.text, gained, ended, False, {"metrics": metrics, "metrics_agg_mode": AGGREGATION}

    def close(self) -> None:
        """Close the instance, if it has a `close`."""
        if hasattr(self._played, "close"):
            self._played.close()

    def _total(self) -> float:
        return float(_value(self._played, "reward", 0.0) or 0.0)


def _value(played: Any, name: str, default: Any) -> Any:
    """Return an attribute, or the result of a method of that name."""
    found = getattr(played, name, default)
    return found() if callable(found) else found


def _accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values that the function has parameters for: all of them, if it has `**row`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}
