"""Command lines of all programs. A mistake is one line with the likely intention, and exit code 2."""

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from spmd_rl.base.errors import tell

ALIKE = 0.7
"""Similarity above which an unknown option counts as mistyped."""


def program(name: str) -> str:
    """Return the start of this program as typed: `spmd-rl doctor`, `python -m spmd_rl.rlvr`."""
    words = sys.orig_argv
    if any(Path(word).name == "spmd-rl" for word in words[:3]):
        return f"spmd-rl {name}"
    return f"python -m spmd_rl.{name}" if f"spmd_rl.{name}" in words else f"python -m spmd_rl {name}"


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors print no usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # An abbreviation would change its meaning with every new option.
        super().__init__(*args, **options, allow_abbrev=False)
        self._words: list[str] = []

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse as the base class does; keep the words for `error`."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        tell(f"error: {self.told(message)}")
        self.exit(2)

    def told(self, message: str) -> str:
        """Return an `argparse` message in our style, with a hint for each unknown option."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            return message.removeprefix("argument ")
        words = unknown.split()
        return " | ".join(self._hint(word) for word in [w for w in words if w.startswith("-")] or words)

    def _hint(self, word: str) -> str:
        name, equals, value = word.partition("=")
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(name, known, 1, ALIKE)
        if near:
            return f"{name}: unknown option; did you mean {near[0]}?"
        following = self._words[self._words.index(word) + 1 :][:1] if word in self._words else []
        return self.unknown(name, value if equals else "".join(w for w in following if not w.startswith("--")))

    def unknown(self, name: str, value: str) -> str:
        """Return the message for an option that resembles none of ours."""
        return f"{name}: unknown option; --help lists all"


def at_least(least: float, kind: type = int) -> Callable[[str], Any]:
    """Return an option's `type`: a finite number of at least `least`."""

    def read(text: str) -> Any:
        try:
            if least <= (number := kind(text)) < math.inf:
                return number
        except ValueError:
            pass
        whole = "whole and " if kind is int else ""
        raise argparse.ArgumentTypeError(f"must be {whole}at least {least:g}, not {text!r}")

    return read
