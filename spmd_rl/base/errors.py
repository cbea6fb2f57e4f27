"""The errors of a run. The author of the mistake decides what happens:

* `UserError`: a setting, a file or a row is wrong. One line naming the key, file or line; exit code 2.
* A sample's mistake is a `Verdict` (see `types`).
* `RunFailed`: the run cannot continue (error budget spent, weights differ after a publish). One line; exit code 1.
* Our own mistake is an `assert` and keeps its traceback.
"""

import re
import sys
import sysconfig
import traceback
from collections.abc import Container, Sequence
from pathlib import Path
from signal import Signals
from typing import TextIO

MAX_CHARACTERS = 300
MAX_TRACEBACK = 8_000
"""Limit of a kept traceback: its beginning and end."""


class _Reported(Exception):
    def __init__(self, line: str = "", report: str = "") -> None:
        super().__init__(line)
        self.report = report
        """Text below the line in `run.dir/error.txt`: a traceback, a prompt, an answer."""


class UserError(_Reported, ValueError):
    """A user's mistake: one line that names the key, file or line to correct. Exit code 2."""


class Disagreement(UserError):
    """A mistake that all ranks report alike; rank 0 alone prints it."""


class RunFailed(_Reported, RuntimeError):
    """The reason, in one line, why the run stops; it resumes from its last checkpoint. Exit code 1."""


class Stopped(Exception):
    """The end of a run that saved a step, on a signal. Exit code 128 and the signal's number."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"{Signals(signum).name}: stopped after step {step}, which is saved")
        self.code = 128 + signum


def one_line(error: BaseException | str) -> str:
    """Return an exception's type and message, or a text, on one printable line of at most 300 characters."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    text = printable(" ".join(text.encode("utf-8", "replace").decode().split()))
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."


def printable(text: str, lines: bool = True) -> str:
    """Return a text with characters escaped that a terminal would act on, or cannot show.

    lines: keep line breaks. Without it, a text from outside cannot pass for a line of ours.
    """
    kept = "\n" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def tell(text: str, lines: bool = False, file: TextIO | None = None) -> None:
    """Print a text at once, made printable, on stderr or another stream: a single line unless `lines`."""
    print(printable(text, lines), file=file or sys.stderr, flush=True)


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Return rows of cells as aligned lines. right: columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    cells = [[pad(cell, n) for pad, cell, n in zip(pads, row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in cells)


def plural(count: int, noun: str) -> str:
    """Return a number of things: `1 row`, `2 rows`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Format a duration in seconds: `4 min 10 s`."""
    whole = round(seconds)
    if whole < 100:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def reason(error: Exception) -> str:
    """Return a user's mistake as text: an `OSError`'s file and reason, else the message."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def located(error: BaseException) -> str:
    """Return an exception on one line, after the user's file and line: `my_reward.py:12: ValueError: no number`.

    The place is the innermost frame outside of this package and of installed packages, else outside of this package. An
    exception with `names_its_place` is printed without it.
    """
    if getattr(error, "names_its_place", False):
        return one_line(str(error))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    users = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
    # Without it a user's file name could hold a line break and pass for a line of ours.
    where = "".join(f"{Path(frame.filename).name}:{frame.lineno}: " for frame in (users or frames)[-1:])
    return printable(where, lines=False) + one_line(error)


def traceback_of(error: BaseException) -> str:
    """Return an exception's traceback from the user's code on, in at most `MAX_TRACEBACK` characters."""
    tb = error.__traceback__
    # The frames of this package say nothing about a mistake in the user's code.
    while tb is not None and _is_ours(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    text = "".join(traceback.format_exception(type(error), error, tb)).encode("utf-8", "replace").decode()
    if len(text) <= MAX_TRACEBACK:
        return text
    return f"{text[: MAX_TRACEBACK // 4]}\n  [...]\n{text[-3 * MAX_TRACEBACK // 4 :]}"


# A bundled reward or environment is a plug-in like any other.
_is_ours = re.compile(rf"{re.escape(str(Path(__file__).parents[1]))}/(?!bundled/)").match
_INSTALLED = ("<", *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, sys.prefix)
