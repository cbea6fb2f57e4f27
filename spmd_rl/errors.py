"""The errors of a run. Who made the mistake decides what happens:

* `UserError`: a setting, a file or a row is wrong. One clear line naming the key, file or line; exit code 2.
* A sample's mistake is no exception at all: it is a `Verdict` (see `types.py`).
* `RunFailed`: the run cannot go on for a reason of its own (error budget spent, weights differ after a publish).
  One clear line; exit code 1.
* Our own mistake is an `assert` and keeps its traceback.
"""

MAX_CHARACTERS = 300


class UserError(ValueError):
    """A user's mistake. The message is one line that names the key, file or line to mend. Exit code 2."""


class Disagreement(UserError):
    """A mistake that all ranks report alike, whatever their settings: rank 0 alone prints it."""


class RunFailed(RuntimeError):
    """The run stops for a reason it can name in one line, and resumes from its last checkpoint. Exit code 1."""


def one_line(error: BaseException | str) -> str:
    """An exception's type and message, or a text, on one line of at most 300 characters."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."
